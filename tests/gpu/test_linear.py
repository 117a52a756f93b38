"""A few rows times a matrix in each weight format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.formats import FORMATS, VARIANTS, Format, rounding_inputs
from slipstream.kernels.triton.linear import KERNELS
from slipstream.ops.bind import Facts
from slipstream.ops.linear import Weight, linear
from tests.gpu.place import place

ALL = {**FORMATS, **VARIANTS}
SHAPES = [
    (1, 64, 8),
    (1, 200, 5),
    (2, 129, 33),
    (3, 640, 6),
    (4, 31, 3),
    (5, 200, 70),
    (33, 640, 20),
    (130, 77, 9),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", ALL.values(), ids=lambda packed: packed.name)
def test_packed_weights_are_multiplied_as_they_are_stored(packed: Format, dtype: torch.dtype) -> None:
    (kernel,) = KERNELS
    assert kernel.refuse(Facts(torch.device("cuda"), dtype, None, packed.name)) is None
    for rows, inputs, outputs in SHAPES:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        weight = packed.weight(torch.randn(outputs, inputs, generator=generator).to(dtype), bias)
        dense = (
            weight.dense() if not packed.bits else weight.unpack(weight.planes, weight.shape, torch.float32)
        )
        expected = x.double() @ dense.double().T + bias.double()
        got = kernel.run(place(x), place(weight)).cpu()
        error = (got.double() - expected).abs().max() / expected.abs().max()
        # Products are summed in float32; what is left is the rounding of the result, and of fp16 in
        # unpacking.
        assert float(error) <= (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_lies_behind_a_matrix_is_not_read(rows: int) -> None:
    """Another tensor may be there, or nothing: a number times zero is no zero where it is none."""
    (kernel,) = KERNELS
    memory = torch.full((7 * 77 + 64,), torch.nan)
    matrix = (
        memory[: 7 * 77].view(7, 77).copy_(torch.randn(7, 77, generator=torch.Generator().manual_seed(1)))
    )
    x = torch.cat([torch.randn(rows, 77), torch.full((2, 77), torch.nan)])
    weight = Weight("plain", (7, 77), (matrix,), lambda *_: matrix)
    got = kernel.run(place(x)[:rows], weight.apply(place)).cpu()
    torch.testing.assert_close(got, x[:rows] @ matrix.T, atol=1e-4, rtol=1e-4)


def test_what_the_kernel_does_not_read_is_left_to_the_reference() -> None:
    (kernel,) = KERNELS
    weight = FORMATS["plain"].weight(torch.randn(6, 4).T, None)
    x = torch.randn(2, 6)
    got = kernel.run(place(x), place(weight)).cpu()
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight.dense()))
    assert "unheard-of" in str(kernel.refuse(Facts(torch.device("cuda"), torch.float32, None, "unheard-of")))


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(129, 64, 48), (130, 200, 32), (131, 77, 9), (20, 64, 48)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows_of_fp8_are_rounded_as_the_reference_rounds_them(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    x[3], x[4, 1:] = 0.0, 0.0
    x[5] = x[5].clamp(-447.9, 447.9) * 448 / x[5].abs().max()  # a largest that is a code
    bias = torch.randn(outputs, generator=generator).to(dtype)
    packed = rounding_inputs(FORMATS["fp8"])
    weight = packed.weight(torch.randn(outputs, inputs, generator=generator).to(dtype), bias)
    assert weight.format == "fp8-a8" and KERNELS[0].refuse(Facts(x.device, dtype, None, "fp8-a8")) is None
    exact = replace(weight, dtype=torch.float64, bias=bias.double())
    expected = linear(x.to(dtype).double(), exact)
    got = KERNELS[0].run(place(x.to(dtype)), place(weight)).cpu()
    error = (got.double() - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=1.0)
    assert got.dtype == dtype and float(error.max()) <= (1e-5 if dtype == torch.float32 else 8e-3)


def test_a_row_with_a_number_that_is_none_has_none_afterwards() -> None:
    x = torch.ones(129, 16, dtype=torch.bfloat16)
    x[7, 3], x[8, 2] = torch.nan, torch.inf
    weight = rounding_inputs(FORMATS["fp8"]).weight(torch.ones(16, 16, dtype=torch.bfloat16), None)
    got = KERNELS[0].run(place(x), place(weight)).cpu()
    assert got[7:9].isnan().all() and got[9:].isfinite().all() and got[:7].isfinite().all()
