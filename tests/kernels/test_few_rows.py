"""Any few rows: each keeps to itself, whichever are beside it, and none reaches beyond its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.formats import FORMATS, VARIANTS, Format, rounding_inputs
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.abi import DTYPES, LinearCall, Matrix
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.kernels.cpu.linear import native_linear
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.linear import Weight, linear
from tests.helpers.libraries import library

INT4 = {name: f for name, f in (FORMATS | VARIANTS).items() if name.startswith("int4")}
EVERY: dict[str, Format] = {
    **{name: f for name, f in (FORMATS | VARIANTS).items() if name in abi.FORMATS},
    "int8, inputs too": rounding_inputs(FORMATS["int8"]),
    "int8, inputs too, zero points": rounding_inputs(FORMATS["int8"], symmetric=False),
    **{f"{name}, inputs too": rounding_inputs(f) for name, f in INT4.items()},
    "int4, inputs too, zero points": rounding_inputs(FORMATS["int4"], symmetric=False),
}
ROWS = (*range(1, 34), 40, 47)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Of the largest number of a row's answer: rounding of the result, in 16 bits also of the row."""
LONG = {torch.float32: 1.4e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The same of 9,001 inputs in place of 200: what a sum rounds away grows with the root of its length."""

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


def weight(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
    dense = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) + 0.2
    return EVERY[name].weight(dense.to(dtype), None)


def rows_of_many_sizes(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    return (x * 10.0 ** -(torch.arange(rows) % 7)[:, None]).to(dtype)


def expected(x: Tensor, own: Weight) -> Tensor:
    if own.rounding is not None:
        return linear(x.float(), own.apply(lambda t: t.float() if t.is_floating_point() else t)).double()
    return x.double() @ own.apply(lambda t: t.double() if t.is_floating_point() else t).dense().double().t()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", EVERY)
def test_each_of_a_few_rows_has_a_size_of_its_own(name: str, isa: str, dtype: torch.dtype) -> None:
    lib, own = library(isa), weight(name, 21, 200, dtype)
    for rows in ROWS:
        x = rows_of_many_sizes(rows, 200, dtype)
        got, right = native_linear(x, own, lib).double(), expected(x, own)
        error = (got - right).abs().amax(-1) / right.abs().amax(-1)
        assert float(error.max()) <= TOLERANCE[dtype], (rows, error)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", EVERY)
def test_rows_of_whole_registers_are_read_where_they_lie(name: str, isa: str, dtype: torch.dtype) -> None:
    lib, own = library(isa), weight(name, 70, 640, dtype)
    for rows in (1, 2, 4, 8, 9, 16, 17, 25, 32, 33, 47):
        x = rows_of_many_sizes(rows, 640, dtype)
        got, right = native_linear(x, own, lib).double(), expected(x, own)
        error = (got - right).abs().amax(-1) / right.abs().amax(-1)
        assert float(error.max()) <= TOLERANCE[dtype], (rows, error)


@pytest.mark.parametrize("dtype", list(LONG), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", EVERY)
def test_a_row_may_be_longer_than_a_cache(name: str, isa: str, dtype: torch.dtype) -> None:
    lib, own = library(isa), weight(name, 11, 9001, dtype)
    for rows in (1, 2):
        x = rows_of_many_sizes(rows, 9001, dtype)
        got, right = native_linear(x, own, lib).double(), expected(x, own)
        error = (got - right).abs().amax(-1) / right.abs().amax(-1)
        assert float(error.max()) <= LONG[dtype], (rows, error)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", EVERY)
def test_a_row_that_is_not_finite_leaves_the_others_alone(name: str, isa: str) -> None:
    lib, own = library(isa), weight(name, 21, 200, torch.bfloat16)
    for rows in range(1, 20):
        x = rows_of_many_sizes(rows, 200, torch.bfloat16)
        whole = native_linear(x, own, lib)
        for odd in {0, rows // 2, rows - 1}:
            broken = x.clone()
            broken[odd, 7] = float("nan")
            got = native_linear(broken, own, lib)
            assert bool(got[odd].isnan().all())
            others = torch.arange(rows) != odd
            torch.testing.assert_close(got[others], whole[others], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", EVERY)
def test_rows_beyond_the_last_are_neither_read_nor_written(name: str, isa: str, dtype: torch.dtype) -> None:
    """Rows are filled up to what is computed together: those are not the caller's."""
    lib = library(isa)
    for outputs, inputs in ((21, 200), (16, 64), (7, 96)):
        own = weight(name, outputs, inputs, dtype)
        matrix = matrix_of(own)
        assert isinstance(matrix, Matrix)
        for rows in (1, 2, 3, 5, 6, 7, 9, 11, 13, 15, 17, 19, 25, 31, 33):
            x = torch.full((rows + 32, inputs), float("nan"), dtype=dtype)
            x[16 : 16 + rows] = rows_of_many_sizes(rows, inputs, dtype)
            out = torch.full((rows + 32, outputs), 77.0, dtype=dtype)
            call = LinearCall(
                x=x[16:].data_ptr(), out=out[16:].data_ptr(), rows=rows, dtype=DTYPES[dtype], weight=matrix
            )
            lib.run("linear", call)
            assert bool((out[:16] == 77).all())
            assert bool((out[16 + rows :] == 77).all())
            alone = native_linear(x[16 : 16 + rows].clone(), own, lib)
            torch.testing.assert_close(out[16 : 16 + rows], alone, rtol=0, atol=0)
