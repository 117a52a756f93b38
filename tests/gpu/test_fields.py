"""What NVIDIA's instructions make of packed bytes, each byte of each format, by a machine that runs it.

No interpreter runs them, and without a GPU nothing else does.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.formats.minifloat import MiniFloat
from slipstream.kernels.triton import fields
from slipstream.kernels.triton.decode import kind_of
from slipstream.kernels.triton.matmul import _factors

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def floats(words: np.ndarray, kind: torch.dtype) -> torch.Tensor:
    """The pairs in words, `(n, 2)` float64."""
    return torch.from_numpy(words.astype("<u4").view("<i2").copy()).view(kind).view(-1, 2).double()


def words_of(values: torch.Tensor, kind: torch.dtype) -> np.ndarray:
    return values.to(kind).view(torch.int16).numpy().reshape(-1, 2).copy().view("<u4")[:, 0].astype(np.uint64)


DOES: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
}


def run(text: str, kind: torch.dtype, outputs: int, given: list[np.ndarray]) -> list[np.ndarray]:
    """Registers `$0` to `$outputs - 1` after a text, of `given` in the registers behind them."""
    held = {f"${outputs + place}": words.astype(np.uint64) for place, words in enumerate(given)}

    def value(name: str) -> np.ndarray:
        return held[name] if name in held else np.full(len(given[0]), int(name, 0), np.uint64)

    for name, rest in re.findall(r"(\w+)(?:\.\w+)* ([^;{}]+);", re.sub(r"\.reg[^;]*;", "", text)):
        into, *others = (one.strip() for one in rest.split(","))
        words = [value(one) for one in others]
        if name == "prmt":
            both = words[0] | words[1] << np.uint64(32)
            picks = [int(others[2], 0) >> 4 * place & 7 for place in range(4)]
            taken = [(both >> np.uint64(8 * pick) & np.uint64(255)) for pick in picks]
            held[into] = sum(byte << np.uint64(8 * place) for place, byte in enumerate(taken))
        elif name == "fma":
            a, b, c = (floats(one, kind) for one in words)
            held[into] = words_of(a * b + c, kind)
        else:
            held[into] = DOES[name](*words) & np.uint64(0xFFFFFFFF)
    return [held[f"${place}"] for place in range(outputs)]


def packed(codes: torch.Tensor) -> np.ndarray:
    return codes.numpy().copy().view("<u4").astype(np.uint64)


def fields_of(text: object, kind: torch.dtype, outputs: int, given: list[np.ndarray]) -> torch.Tensor:
    """`(fields, bytes)` float64."""
    found = [floats(one, kind) for one in run(text.value, kind, outputs, given)]  # type: ignore[attr-defined]
    return torch.stack([torch.cat(found[n : n + 2], 1).flatten() for n in range(0, outputs, 2)])


@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_what_they_stand_for(name: str) -> None:
    kind = KINDS[name]
    for format_, numbers in (("INT8", ALL.view(torch.int8)), ("FP8", ALL.view(torch.float8_e4m3fn))):
        (got,) = fields_of(getattr(fields, f"{format_}_{name.upper()}"), kind, 2, [packed(ALL)])
        expected = numbers.double()
        some = expected.isfinite()
        assert got[some].equal(expected[some])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_nibbles_are_scaled(name: str, symmetric: bool) -> None:
    kind = KINDS[name]
    scale = (torch.randn(256, generator=torch.Generator().manual_seed(1)) / 8).to(kind)
    minimum = scale * 0 if symmetric else (-7 * scale).to(kind)
    given = [
        packed(ALL),
        *(words_of(part.view(-1, 4)[:, at : at + 2], kind) for part in (scale, minimum) for at in (0, 2)),
    ]
    got = fields_of(getattr(fields, f"INT4{'_SYM' * symmetric}_{name.upper()}"), kind, 4, given)
    codes = torch.stack([ALL & 15, ALL >> 4]).double() - 8 * symmetric
    assert got.equal((codes * scale.double() + minimum.double()).to(kind).double())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("form", "small"), [("E2M3", MiniFloat(2, 3, 7.5)), ("E3M2", MiniFloat(3, 2, 28.0))])
@pytest.mark.parametrize("odd", [False, True])
def test_six_bits_are_scaled(name: str, form: str, small: MiniFloat, odd: bool) -> None:
    """By the smallest and the largest scales that there are, too."""
    kind = KINDS[name]
    low = ALL.repeat(256)
    high = ALL.repeat_interleave(256)
    nothing = torch.zeros_like(high)
    exponent = torch.randint(-14, 11, low.shape, generator=torch.Generator().manual_seed(1))
    scale = torch.ldexp(1 + torch.rand(low.shape, generator=torch.Generator().manual_seed(2)), exponent)
    scale = scale.half().float()
    factors = _factors(kind_number(f"fp6{'-e3m2' * (form == 'E3M2')}"), kind, hand=True)
    lifted = (scale * factors["LIFT"]).to(kind)
    given = [packed(part) for part in ((low, nothing, high) if odd else (low, high, nothing))]
    given += [words_of(lifted.view(-1, 4)[:, at : at + 2], kind) for at in (0, 2)]
    got = fields_of(getattr(fields, f"{form}_{name.upper()}"), kind, 4, given) * factors["RESCALE"]
    four = high >> 4 if odd else high & 15
    codes = small.decode(torch.stack([(low & 15) | (four & 3) << 4, low >> 4 | (four >> 2) << 4])).double()
    assert got.equal((codes * scale.to(kind).double()).to(kind).double())
    # A scale has 11 bits, and one of bfloat16 has 8: it is rounded, and so is its product with a code.
    bound = (codes * scale.double()).abs() * (2.0**-7 if kind == torch.bfloat16 else 2.0**-11)
    assert bool(((got - codes * scale.double()).abs() <= 1.01 * bound + 2.0**-25).all())


def kind_number(name: str) -> int:
    known = kind_of(name)
    assert known is not None
    return known[0]
