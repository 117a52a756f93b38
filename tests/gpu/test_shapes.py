"""Shapes that nobody chose: attention, and what stands before it, of random heads, groups, pages, windows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slipstream.kernels.triton import KERNELS
from slipstream.ops import OPS
from slipstream.ops.paged_attention import _case as attention_case
from slipstream.ops.rope_cache import _case as rope_case
from tests.gpu.place import place
from tests.gpu.test_kernels import TOLERANCE, double

DIMS = (32, 40, 64, 72, 80, 96, 112, 128, 192, 256)
SEEDS = range(10)


def attention_of(seed: int) -> Any:
    """Some sequences of random lengths, of which some are decode steps and some are chunks."""
    choose = random.Random(seed)
    kv_heads = choose.choice((1, 2, 3))
    heads = kv_heads * choose.choice((1, 2, 3, 5, 7, 8))
    rows = choose.randint(1, 3)
    new = [choose.choice((1, 1, 2, 17, 33)) if seed % 2 else 1 for _ in range(rows)]
    lens = tuple(count + choose.choice((0, 1, 15, 40, 129)) for count in new)
    options: dict[str, Any] = {
        "window": choose.choice((None, None, 1, 2, 31, 64)),
        "softcap": choose.choice((None, None, 5.0)),
        "sinks": choose.random() < 0.3,
        "alibi": choose.random() < 0.2,
        "int8": choose.random() < 0.3,
        "bound": choose.random() < 0.5,
    }
    shape = (heads, kv_heads, DIMS[seed % len(DIMS)], choose.choice((8, 16, 32, 5)))
    return attention_case(str(seed), tuple(new), lens, heads=shape, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_of_random_shapes(seed: int) -> None:
    dtype = (torch.float32, torch.bfloat16)[seed // 2 % 2]
    arguments = attention_of(seed).make(torch.Generator().manual_seed(seed), dtype)
    kernel = next(k for k in KERNELS if k.op == "paged_attention")
    expected = OPS["paged_attention"].reference(**{n: double(v) for n, v in arguments.items()})
    got = kernel.run(**{n: place(v) for n, v in arguments.items()}).cpu()
    error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert float(error) <= TOLERANCE[dtype]


@pytest.mark.parametrize("seed", SEEDS)
def test_rope_and_cache_of_random_shapes(seed: int) -> None:
    choose = random.Random(seed)
    dim = DIMS[seed]
    heads = (choose.choice((1, 3, 14)), choose.choice((1, 2, 5)), dim)
    rotated = choose.choice((0, 2, dim // 4 * 2, dim))
    case = rope_case(str(seed), choose.randint(1, 6), heads, rotated, pairs=seed % 2 == 0, int8=seed % 3 == 0)
    ours, theirs = (case.make(torch.Generator().manual_seed(seed), torch.float32) for _ in range(2))
    kernel = next(k for k in KERNELS if k.op == "rope_cache")
    given = {n: place(v) for n, v in ours.items()}
    torch.testing.assert_close(kernel.run(**given).cpu(), OPS["rope_cache"].reference(**theirs))
    for name in OPS["rope_cache"].writes:
        got, expected = given[name], theirs[name]
        for part in ("codes", "scales") if seed % 3 == 0 else ("",):
            a, b = (getattr(c, part) if part else c for c in (got, expected))
            torch.testing.assert_close(a.cpu(), b, atol=1 if part == "codes" else 1e-5, rtol=1e-5)
