"""Rounded rows times whole numbers natively: a row alone is answered as among others, nothing overflows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.errors import DeviceError
from slipstream.formats import FORMATS, VARIANTS, rounding_inputs
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.abi import LinearCall, Matrix
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.kernels.cpu.linear import KERNELS, native_linear
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.linear import Rounding, Weight, linear
from tests.helpers.libraries import library

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


NAMES = ("int8", *(name for name in FORMATS | VARIANTS if name.startswith("int4")))


def weight(
    outputs: int, inputs: int, name: str = "int8", *, symmetric: bool = True, groups: int = 1
) -> Weight:
    dense = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) + 0.2
    packed = rounding_inputs((FORMATS | VARIANTS)[name], symmetric=symmetric, groups=groups)
    return packed.weight(dense, torch.randn(outputs, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_s_answer_does_not_depend_on_the_rows_beside_it(name: str, symmetric: bool, isa: str) -> None:
    own, lib = weight(70, 200, name, symmetric=symmetric), library(isa)
    x = torch.randn(100, 200, generator=torch.Generator().manual_seed(3))
    whole = native_linear(x, own, lib)
    torch.testing.assert_close(whole, linear(x, own), rtol=1e-4, atol=1e-4)
    for count in (1, 2, 5, 17, 33, 48):
        # Sums of codes are exact; of the floats after them, in answers of about 14, the order differs.
        torch.testing.assert_close(native_linear(x[:count], own, lib), whole[:count], rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("rows", [1, 50])
def test_the_largest_sums_do_not_overflow(rows: int, isa: str) -> None:
    """All codes at their ends, as many inputs as are taken, in one sum that goes through several passes."""
    inputs = 1 << 16
    codes = torch.full((3, inputs), 127, dtype=torch.int8)
    codes[1], codes[2, ::2] = -127, -127
    planes = (codes, torch.ones(3))
    own = Weight("int8-a8-asym", (3, inputs), planes, FORMATS["int8"].unpack, None, torch.float32)
    own = replace(own, rounding=Rounding(symmetric=False))
    x = torch.ones(rows, inputs)
    expected = torch.tensor([127.0 * inputs, -127.0 * inputs, 0.0]).expand(rows, 3)
    for sign in (1, -1):
        got = native_linear(x * sign, own, library(isa))
        # Where bytes are not multiplied as such, floats are summed.
        torch.testing.assert_close(got, expected * sign, rtol=1e-5, atol=1e-5 * 127 * inputs)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("int4")])
@pytest.mark.parametrize("rows", [1, 2, 4, 9, 24, 60])
def test_the_largest_sums_of_a_group_do_not_overflow(rows: int, name: str, isa: str) -> None:
    """Codes at both of their ends beside rows at both of theirs, of which all add up."""
    dense = torch.full((9, 384), 15.0)
    dense[:, ::32] = 0
    dense[1::2] *= -1
    own = rounding_inputs((FORMATS | VARIANTS)[name]).weight(dense, None)
    x = torch.ones(rows, 384)
    x[1::2] *= -1
    torch.testing.assert_close(native_linear(x, own, library(isa)), linear(x, own), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("rows", [1, 3, 60])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_row_that_is_not_finite_shows_in_its_own_answer(
    name: str, value: float, rows: int, isa: str
) -> None:
    own = weight(20, 70, name)
    x = torch.randn(rows, 70, generator=torch.Generator().manual_seed(4))
    x[-1, 3] = value
    got = native_linear(x, own, library(isa))
    assert bool(got[-1].isnan().all())
    torch.testing.assert_close(got[:-1], linear(x[:-1], own), rtol=1e-4, atol=1e-4)


def test_groups_and_rows_beyond_32_bits_are_left_to_the_reference() -> None:
    grouped = weight(300, 256, groups=4)
    assert "int8-a8-g4" in str(matrix_of(grouped))
    x = torch.randn(3, 256)
    for kernel in KERNELS:
        torch.testing.assert_close(kernel.run(x, grouped), linear(x, grouped))
    assert "overflow" in str(matrix_of(weight(1, (1 << 16) + 1)))
    with pytest.raises(ValueError, match="overflow"):
        native_linear(torch.randn(1, (1 << 16) + 1), weight(1, (1 << 16) + 1), library("baseline"))


def test_a_rounding_that_there_is_not_is_refused_before_memory_is_touched() -> None:
    x, out, lib = torch.randn(1, 96), torch.empty(1, 8), library("baseline")
    for own, change in (
        (weight(8, 96), {"input_bits": 4}),
        (weight(8, 96), {"input_zero": 2}),
        (weight(8, 96), {"input_bits": 0, "input_zero": 1}),
        (FORMATS["fp8"].weight(torch.randn(8, 96), None), {"input_bits": 8}),
        (FORMATS["plain"].weight(torch.randn(8, 96), None), {"input_bits": 8}),
    ):
        matrix = matrix_of(own)
        assert isinstance(matrix, Matrix)
        for field, value in change.items():
            setattr(matrix, field, value)
        call = LinearCall(x=x.data_ptr(), out=out.data_ptr(), rows=1, dtype=0, weight=matrix)
        with pytest.raises(DeviceError, match="unknown"):
            lib.run("linear", call)
