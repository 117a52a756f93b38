"""The interpreter computes as a GPU does, once it is repaired."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _arithmetic(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < n, other=0.0)
    y = tl.load(b + i, mask=i < n, other=1.0)
    tl.store(out + i, tl.where(x > y, x * y + x, x / y - y), mask=i < n)


@triton.jit
def _product(a, b, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _cast(a, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i).to(out.dtype.element_ty))


@triton.jit
def _loop(out, n):
    total = 0
    for i in range(0, n, 3):
        total += i
    tl.store(out, total)


def test_bfloat16_is_computed_as_torch_computes_it() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(50, generator=generator).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    _arithmetic[(1,)](a, b, out, 50, BLOCK=64)
    quotient = (a.float() / b.float() - b.float()).to(torch.bfloat16)  # Triton divides in float32
    assert torch.equal(out, torch.where(a > b, a * b + a, quotient))


def test_a_product_of_bfloat16_is_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=generator).to(torch.bfloat16) for _ in range(2))
    out = torch.empty(32, 32)
    _product[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_a_cast_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    values = torch.randn(256, generator=torch.Generator().manual_seed(0)) * 20
    out = torch.empty(256, dtype=dtype)
    _cast[(1,)](values, out, BLOCK=256)
    assert torch.equal(out.float(), values.to(dtype).float())
    back = torch.empty(256)
    _cast[(1,)](out, back, BLOCK=256)
    assert torch.equal(back, out.float())


def test_a_cast_to_e4m3_saturates_as_the_gpu_does() -> None:
    out = torch.empty(2, dtype=torch.float8_e4m3fn)
    _cast[(1,)](torch.tensor([1e6, -1e6]), out, BLOCK=2)
    assert out.float().tolist() == [448.0, -448.0]


def test_a_loop_may_run_to_a_bound_known_at_run_time() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    _loop[(1,)](out, 10)
    assert int(out) == 0 + 3 + 6 + 9
