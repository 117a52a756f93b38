"""Every kernel of the GPU agrees with its op's reference: each case and dtype, on a GPU or interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.triton import KERNELS
from slipstream.ops import OPS
from slipstream.ops.bind import Case, Facts, Kernel
from slipstream.ops.kv_cache import CachePart, Int8Cache
from slipstream.ops.linear import Weight
from tests.gpu.place import place

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Beside the reference in double: the result's own rounding, and that of rows in products of 16 bits."""

CHOOSE = ("draw", "sample")
"""Ops whose result is a token: the same one."""


def double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value.apply(lambda t: t.double()) if isinstance(value, Weight) else value


def planes(cache: CachePart) -> tuple[Tensor, ...]:
    return (cache.codes, cache.scales) if isinstance(cache, Int8Cache) else (cache,)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("kernel", "case"),
    [(kernel, case) for kernel in KERNELS for case in OPS[kernel.op].cases],
    ids=lambda value: f"{value.op}-{value.name}" if isinstance(value, Kernel) else value.name,
)
def test_a_kernel_agrees_with_its_reference(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    if kernel.refuse(Facts(torch.device("cuda"), dtype)) is not None:
        pytest.skip(f"{kernel.name} does not compute in {dtype}")
    if kernel.op in CHOOSE and dtype != torch.float32:
        pytest.skip("scores are float32 in every model")
    arguments, others = (case.make(torch.Generator().manual_seed(3), dtype) for _ in range(2))
    exact = {name: double(value) for name, value in arguments.items()}
    expected = OPS[kernel.op].reference(**exact)
    given = {name: place(value) for name, value in others.items()}
    got = kernel.run(**given).cpu()
    for name in OPS[kernel.op].writes:
        for ours, theirs in zip(planes(given[name]), planes(exact[name]), strict=True):
            # A code of int8 may round to its neighbour, where what is rounded was rounded to 16 bits before.
            off = (ours.cpu().double() - theirs.double()).abs().max()
            assert float(off) <= (
                1 if ours.dtype == torch.int8 else TOLERANCE[dtype] * float(theirs.double().abs().max())
            )
    assert got.shape == expected.shape
    if kernel.op in CHOOSE:
        assert got.dtype == torch.int64 and got.tolist() == expected.tolist()
        return
    assert got.dtype == dtype
    assert got.isfinite().all()
    error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert float(error) <= TOLERANCE[dtype]
