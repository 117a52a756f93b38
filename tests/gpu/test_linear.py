"""A few rows times a matrix in each weight format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from slipstream.formats import FORMATS, VARIANTS, Format, rounding_inputs
from slipstream.kernels.triton.linear import KERNELS, matrix_of
from slipstream.kernels.triton.one_row import times_row
from slipstream.kernels.triton.operands import Around
from slipstream.kernels.triton.words import _fp6_bytes
from slipstream.ops.bind import Facts
from slipstream.ops.linear import Weight, linear
from tests.gpu.place import place

ALL = {**FORMATS, **VARIANTS}
UNPACKED = ("bf13",)
"""What no kernel reads, and torch multiplies once it is unpacked."""

READ = {name: packed for name, packed in ALL.items() if name not in UNPACKED}
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


@pytest.mark.parametrize("name", UNPACKED)
def test_what_no_kernel_reads_is_refused_with_the_reason(name: str) -> None:
    (kernel,) = KERNELS
    reason = kernel.refuse(Facts(torch.device("cuda"), torch.bfloat16, None, name))
    assert reason == f"does not read the weight format '{name}'"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", READ.values(), ids=lambda packed: packed.name)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["fp6", "fp6-e3m2", "int4-g64", "int4-g128"])
@pytest.mark.parametrize("rows", [1, 3, 40, 130])
def test_each_group_has_its_own_scale(name: str, rows: int, dtype: torch.dtype) -> None:
    """Neighbours a thousand times as large, the first and the last ones too, of rows large and tiny."""
    (kernel,) = KERNELS
    inputs, outputs = 4 * 320 + 17, 12
    generator = torch.Generator().manual_seed(rows)
    dense = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-1, 1, outputs)[:, None]
    dense *= 10.0 ** (torch.arange(inputs) // 64 * 7 % 5 - 3.0)
    # Of each output only one group of inputs counts: a scale of another one would change all of the sum.
    alone = torch.arange(inputs) // 64 == torch.arange(outputs)[:, None] * 2 % 20
    dense = torch.where(alone, dense, 0.0)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = ALL[name].weight(dense, None)
    exact = weight.unpack(weight.planes, weight.shape, torch.float32).double()
    weight = replace(weight, dtype=dtype)
    expected, most = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    got = kernel.run(place(x), place(weight)).cpu().double()
    # As above; results that are small in float16 are as far apart as its smallest numbers.
    apart = 2.0**-24 if dtype == torch.float16 else 0.0
    error = ((got - expected).abs() - apart).amax(0) / most.amax(0)
    assert float(error.max()) <= (1e-5 if dtype == torch.float32 else 8e-3)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp6"])
@pytest.mark.parametrize("given", ["as it is", "behind another", "a float32 gain", "a layer norm", "a bias"])
def test_a_row_is_normalised_however_its_vectors_lie(name: str, given: str, dtype: torch.dtype) -> None:
    """Four numbers at a time where they can be read so, else one by one."""
    generator = torch.Generator().manual_seed(0)
    inputs, first = 160, 1 if given == "behind another" else 0
    x, gain, shift = (torch.randn(inputs + 1, generator=generator) + 1 for _ in range(3))
    x, gain, shift = (place(v.to(dtype))[first : first + inputs] for v in (x, gain, shift))
    gain = gain.float() if given == "a float32 gain" else gain
    norm = 2 if given == "a layer norm" else 1
    with_shift = given in ("a layer norm", "a bias")
    weight = FORMATS[name].weight(torch.randn(24, inputs, generator=generator), None)
    around = Around(norm=norm, eps=1e-5, gain=gain, shift=shift if with_shift else None)
    matrix = matrix_of(weight.apply(place))
    assert not isinstance(matrix, str)
    got = times_row(x[None], matrix, around).cpu().double()
    row = x.cpu().double() - (x.cpu().double().mean() if norm == 2 else 0.0)
    row = row * (row.square().mean() + 1e-5).rsqrt() * gain.cpu().double()
    expected = (row + (shift.cpu().double() if with_shift else 0.0)) @ weight.dense().double().T
    # Both sides of products of floats are in float16, a row of integers in 16 bits; the rest is the result's.
    assert float((got - expected).abs().max() / expected.abs().max()) <= (
        8e-3 if dtype == torch.bfloat16 else 2e-3
    )


@pytest.mark.parametrize("e3m2", [False, True], ids=["e2m3", "e3m2"])
def test_codes_of_six_bits_are_bytes_that_the_hardware_converts(e3m2: bool) -> None:
    """Every code, in each place of a word: as bytes of e4m3 or e5m2 they stand for a power of two of it."""
    codes = torch.arange(64, dtype=torch.int64)
    codes = torch.stack([codes.roll(n) for n in range(4)], 1)  # four neighbours are four bytes
    place_of = 256 ** torch.arange(4)
    for part in range(4):
        low = ((codes & 15) << (4 * (part % 2))).mul(place_of).sum(1)
        high = ((codes >> 4) << (2 * part)).mul(place_of).sum(1)
        out = torch.zeros(64, dtype=torch.int32)
        _six_bits[(1,)](place(low.to(torch.int32)), place(high.to(torch.int32)), out := place(out), PART=part)
        found = out.cpu().view(torch.uint8).view(64, 4)
        wide = found.view(torch.float8_e5m2 if e3m2 else torch.float8_e4m3fn).double()
        mantissa = 2 if e3m2 else 3
        exponent, rest = (codes & 31) >> mantissa, (codes & (2**mantissa - 1)) / 2**mantissa
        bias = 3 if e3m2 else 1
        value = torch.where(exponent > 0, (1 + rest) * 2.0 ** (exponent - bias), rest * 2.0 ** (1 - bias))
        value = torch.where(codes >= 32, -value, value)
        assert torch.equal(wide * 2.0 ** (12 if e3m2 else 6), value)


@triton.jit
def _six_bits(low, high, out, PART: tl.constexpr):
    at = tl.arange(0, 64)
    lower, upper = (
        tl.load(low + at).to(tl.uint32, bitcast=True),
        tl.load(high + at).to(tl.uint32, bitcast=True),
    )
    tl.store(out + at, _fp6_bytes(lower, upper, PART).to(tl.int32, bitcast=True))
