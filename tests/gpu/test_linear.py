"""A few rows times a matrix in each weight format."""

from __future__ import annotations

import pytest
import torch

from slipstream.formats import FORMATS, VARIANTS, Format
from slipstream.kernels.triton.linear import KERNELS
from slipstream.ops.bind import Facts
from slipstream.ops.linear import Weight
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
