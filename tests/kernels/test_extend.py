"""Layers that go on from keys and values say what the same layers say of all tokens at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import DeviceError
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import EMULATED, ISAS, Library, load
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.model.fused.padding import pack
from tests.families.sweep import VARIANTS
from tests.kernels.test_stack import accepted, refuse_to_run

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
"""Of the largest value; keys in bfloat16 are rounded once they are kept, and not within one call."""

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

Kept = list[tuple[Tensor, Tensor]]


class Run:
    """A model's layers on the states of some sequences of equal length."""

    def __init__(self, name: str, isa: str, dtype: torch.dtype) -> None:
        library = load(isa)
        if library is None:
            pytest.skip(f"this machine has no {isa}")
        engine = accepted(next(v for v in VARIANTS if v[0].name == name), dtype)
        self.blocks = engine._built.runner.blocks
        self.frame = engine._built.runner.frame
        self.stack = NativeStack(self.blocks, library, refuse_to_run)
        self.stack.most_tokens = 10_000

    def __call__(self, x: Tensor, first: int, kept: Kept | None) -> tuple[Tensor, Kept]:
        batch, length, width = x.shape
        places = torch.arange(first, first + length).repeat(batch)
        tables = self.frame.angles(places, [block.spec.rope for block in self.blocks])
        packed = pack(None, batch, length, specs=()).packed
        older = [(None, None)] * len(self.blocks) if kept is None else kept
        found = self.stack.extend(self.blocks, x.flatten(0, 1), packed, tables, older)
        assert found is not None
        return found[0].view(batch, length, width), found[1]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "bloom", "minicpm3", "youtu"])
def test_chunks_and_all_at_once(name: str, isa: str, dtype: torch.dtype) -> None:
    run = Run(name, isa, dtype)
    width = run.blocks[0].spec.hidden
    x = torch.randn(3, 71, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    whole, kept_whole = run(x, 0, None)
    parts: list[Tensor] = []
    kept: Kept | None = None
    at = 0
    for size in (40, 1, 17, 1, 12):
        left, kept = run(x[:, at : at + size].contiguous(), at, kept)
        parts.append(left)
        at += size
    assert kept is not None
    close(torch.cat(parts, dim=1), whole, dtype)
    for pair, other in zip(kept, kept_whole, strict=True):
        for one, same in zip(pair, other, strict=True):
            assert one.shape[2] == 71 and one.is_contiguous()
            close(one, same, dtype)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    # Where two experts score the same but for rounding, either may be chosen: a tenth of the tokens may.
    off = (got.float() - expected.float()).abs().amax(-1).flatten() / expected.float().abs().max()
    ties = 0.1 if dtype == torch.bfloat16 else 0.0
    assert float(off.sort().values[: len(off) - int(ties * len(off))].max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "change",
    [
        {"heads_first": 2},
        {"heads_first": 0},
        {"past": -1},
        {"past": 6},
        {"cache_blocks": 1},
        {"table_width": 0},
    ],
    ids=str,
)
def test_a_call_that_contradicts_itself_is_refused(
    change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("llama", "baseline", torch.float32)
    x = torch.randn(2, 3, run.blocks[0].spec.hidden)
    _, kept = run(x, 0, None)
    own = Library.run

    def changed(self: Library, name: str, call: Any) -> None:
        for field, value in change.items():
            setattr(call.step, field, value)
        own(self, name, call)

    monkeypatch.setattr(Library, "run", changed)
    with pytest.raises(DeviceError):
        run(x[:, :2].contiguous(), 3, kept)


@pytest.mark.parametrize("missing", ["past_k", "past_v"])
def test_a_past_that_is_absent_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("llama", "baseline", torch.float32)
    x = torch.randn(1, 2, run.blocks[0].spec.hidden)
    _, kept = run(x, 0, None)
    own = Library.run

    def changed(self: Library, name: str, call: Any) -> None:
        setattr(call.caches[1], missing, None)
        own(self, name, call)

    monkeypatch.setattr(Library, "run", changed)
    with pytest.raises(DeviceError):
        run(x, 2, kept)


def test_codes_with_heads_first_are_refused() -> None:
    library = load("baseline")
    assert library is not None
    codes, scales = torch.zeros(1, 4, 1, 8, dtype=torch.int8), torch.zeros(1, 4, 1)
    ints = torch.tensor([0, 1], dtype=torch.int32)
    q = torch.zeros(1, 1, 8)
    call = abi.PagedAttentionCall(q=q.data_ptr(), out=q.data_ptr(), heads=1, kv_heads=1, head_dim=8)
    call.cache = abi.Cache(codes.data_ptr(), codes.data_ptr(), scales.data_ptr(), scales.data_ptr())
    call.cache_dtype, call.mask.scale = abi.INT8_CODES, 1.0
    call.step = abi.Step(
        tokens=1,
        sequences=1,
        table_width=1,
        cache_blocks=1,
        block_size=4,
        query_starts=ints.data_ptr(),
        kv_lens=ints[1:].data_ptr(),
        block_table=ints.data_ptr(),
        heads_first=1,
    )
    with pytest.raises(DeviceError):
        library.run("paged_attention", call)
