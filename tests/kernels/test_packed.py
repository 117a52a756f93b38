"""Packed weights are multiplied as they are stored: every format, instruction set and awkward shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.errors import DeviceError
from slipstream.formats import FORMATS, VARIANTS
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.abi import LinearCall, Matrix
from slipstream.kernels.cpu.feed_forward import native_feed_forward
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.kernels.cpu.linear import KERNELS, native_linear
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.bind import Kernel
from slipstream.ops.feed_forward import feed_forward
from slipstream.ops.linear import Weight
from tests.helpers.libraries import library

PACKED = {name: f for name, f in (FORMATS | VARIANTS).items() if name != "plain" and name in abi.FORMATS}
"""The formats that the library reads; all others are unpacked first."""

ROWS = (*range(1, 34), 37, 44, 47, 48, 50)
"""Rows are taken by themselves, a few together, in lanes of eight and sixteen, and by panels: each number of
them, and what is left behind sixteen and 32."""

SHAPES = ((1, 32), (7, 96), (33, 129), (64, 128), (40, 1), (19, 576), (70, 1100))
"""Outputs and inputs: one, odd, prime, less and more than a group, a block and a panel."""

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Beside the product with the unpacked matrix in double: rounding of the result; in 16 bits also of rows, and
of the weights of groups times their scales, in products of bfloat16."""

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


def weight(name: str, *shape: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> Weight:
    generator = torch.Generator().manual_seed(shape[-1])
    # Rows of many sizes, none centred: multipliers and minima all count.
    size = torch.logspace(-2, 1, shape[-2])[:, None]
    dense = (torch.randn(*shape, generator=generator) + 0.3) * size / shape[-1] ** 0.5
    b = torch.randn(*shape[:-1], generator=generator).to(dtype) if bias else None
    return PACKED[name].weight(dense.to(dtype), b)


def error(got: Tensor, x: Tensor, own: Weight) -> float:
    own = own.apply(lambda t: t.double())
    dense = own.dense()
    expected = x.double() @ dense.t()
    # Of what the terms of a sum could make together: whether they cancel is chance. Below the least normal
    # number the result has whole units of the least of all.
    size = x.double().norm(dim=-1)[:, None] * dense.norm(dim=-1)
    if own.bias is not None:
        expected, size = expected + own.bias, size + own.bias.abs()
    assert got.isfinite().all()
    return float(((got.double() - expected).abs() / size.clamp(min=torch.finfo(got.dtype).tiny)).max())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", PACKED)
def test_rows_times_a_packed_matrix(name: str, isa: str, dtype: torch.dtype) -> None:
    lib = library(isa)
    for outputs, inputs in SHAPES:
        own = weight(name, outputs, inputs, dtype=dtype, bias=outputs % 2 == 1)
        for rows in ROWS:
            x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
            assert error(native_linear(x, own, lib), x, own) <= TOLERANCE[dtype], (outputs, inputs, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", PACKED)
def test_inputs_that_are_taken_in_several_passes(name: str, isa: str, dtype: torch.dtype) -> None:
    """Rows too long for the first cache: passes that are full, and ends of every kind."""
    lib = library(isa)
    for outputs, inputs in ((3, 1537), (9, 2112), (8, 3073), (17, 4160), (5, 5632 + 65)):
        own = weight(name, outputs, inputs, dtype=dtype)
        for rows in (4, 5, 8, 11, 16, 23, 32):
            x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
            assert error(native_linear(x, own, lib), x, own) <= TOLERANCE[dtype], (outputs, inputs, rows)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_the_largest_codes_times_the_largest_numbers_overflow_no_sum(name: str, dtype: torch.dtype) -> None:
    signs = torch.ones(5, 1100)
    signs[1], signs[2, ::2], signs[3, 700:] = -1, -1, -1
    own = PACKED[name].weight(signs.to(dtype), None)
    for lib in filter(None, map(load, ISAS)):
        for rows, value in ((1, 1), (3, -1), (8, 1), (8, -1), (16, 1), (32, -1), (50, 1)):
            x = torch.full((rows, 1100), value, dtype=dtype)
            assert error(native_linear(x, own, lib), x, own) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_groups_of_very_different_size_keep_their_own_scales(name: str, dtype: torch.dtype) -> None:
    """Each group alone is met by a row that is zero elsewhere: nothing larger hides a scale of another."""
    inputs, width = 832, 32
    dense = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1))
    sizes = 2.0 ** -(torch.arange(inputs // width) % 5).repeat_interleave(width)
    own = PACKED[name].weight((dense * sizes).to(dtype), None)
    exact = own.apply(lambda t: t.double()).dense()
    x = torch.eye(inputs // width).repeat_interleave(width, dim=1).to(dtype)
    for lib in filter(None, map(load, ISAS)):
        for rows in (x, *x.split(1), *x.split(3)):
            got, expected = native_linear(rows, own, lib).double(), rows.double() @ exact.t()
            size = width * exact.abs().amax(-1)  # sums that cancel begin with all of a group
            assert bool(((got - expected).abs() <= TOLERANCE[dtype] * size).all())


@pytest.mark.parametrize("name", PACKED)
def test_the_last_byte_is_the_last_that_is_read(name: str) -> None:
    """Each plane ends where its memory does (under the sanitizers a read beyond it is an error)."""
    for inputs in (65, 129, 200, 545, 576, 1601):
        own = weight(name, 3, inputs)
        for x in (torch.randn(rows, inputs) for rows in (1, 2, 4, 5, 8, 16, 24, 32)):
            for isa in ISAS:
                if (lib := load(isa)) is not None:
                    got = native_linear(x, own.apply(torch.clone), lib)
                    assert error(got, x, own) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", PACKED)
def test_a_single_row_of_any_size(name: str, isa: str, dtype: torch.dtype) -> None:
    """One row may be taken as whole numbers of units: what none can hold makes NaN."""
    lib, own = library(isa), weight(name, 20, 300, dtype=dtype)
    x = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    largest = torch.finfo(dtype).max / 1e6  # of what is before the multiplier of a row too
    for size in (1e-4, 10, largest / float(x.abs().max())):
        scaled = (x.double() * size).to(dtype)
        assert error(native_linear(scaled, own, lib), scaled, own) <= TOLERANCE[dtype], size
    outlier = x.clone()
    outlier[0, 7] = 500
    assert error(native_linear(outlier, own, lib), outlier, own) <= TOLERANCE[dtype]
    assert not native_linear(torch.zeros_like(x), own, lib).any()
    for odd in (float("nan"), float("inf"), -float("inf")):
        broken = x.clone()
        broken[0, 299] = odd
        got = native_linear(broken, own, lib)
        assert not got[:, own.dense()[:, 299] != 0].isfinite().any()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", PACKED)
def test_many_rows_pass_two_packed_matrices_in_one_call(name: str, isa: str, dtype: torch.dtype) -> None:
    # The second has more inputs than the first: what enters it may need more room.
    lib = library(isa)
    first, last = weight(name, 2 * 150, 40, dtype=dtype), weight(name, 33, 150, dtype=dtype)
    plain = [w.apply(lambda t: t.double()) for w in (first, last)]
    x = torch.randn(70, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = native_feed_forward(x, first, last, name="silu", gated=True, library=lib).double()
    right = feed_forward(x.double(), *plain, name="silu", gated=True)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]  # of two roundings
    assert float((got - right).norm() / right.norm()) <= tolerance


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("inputs", (1 << 19, (1 << 19) + 1))
def test_sums_of_a_long_row_do_not_overflow(inputs: int, isa: str) -> None:
    lib, x = library(isa), torch.ones(1, inputs)
    own = PACKED["int8"].weight(torch.stack((torch.ones(inputs), -torch.ones(inputs))), None)
    got = native_linear(x, own, lib)
    torch.testing.assert_close(got, torch.tensor([[inputs, -inputs]], dtype=torch.float32), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["plain", *PACKED])
def test_one_expert_is_described_where_it_lies(name: str) -> None:
    own = weight(name, 3, 10, 96, bias=True) if name in PACKED else None
    if own is None:
        own = Weight("plain", (3, 10, 96), (torch.randn(3, 10, 96),), lambda *_: None, torch.randn(3, 10))
    x, out = torch.randn(2, 96), torch.empty(2, 10)
    matrix = matrix_of(own, expert=1)
    assert isinstance(matrix, Matrix)
    call = LinearCall(x=x.data_ptr(), out=out.data_ptr(), rows=2, dtype=0, weight=matrix)
    library("baseline").run("linear", call)
    assert own.bias is not None
    torch.testing.assert_close(out, x @ own.at(1).dense().t() + own.bias[1], atol=1e-4, rtol=1e-4)
    assert "3 dimensions" in str(matrix_of(own))


def test_planes_that_do_not_fit_are_refused_before_memory_is_touched() -> None:
    x, out, lib = torch.randn(1, 96), torch.empty(1, 8), library("baseline")

    def run(own: Weight, **change: int) -> None:
        matrix = matrix_of(own)
        assert isinstance(matrix, Matrix)
        for field, value in change.items():
            setattr(matrix, field, value)
        call = LinearCall(x=x.data_ptr(), out=out.data_ptr(), rows=1, dtype=0, weight=matrix)
        lib.run("linear", call)

    own = weight("int4", 8, 96)
    run(own)
    for change, message in (
        ({"group": 0}, "unknown"),
        ({"group": 48}, "unknown"),
        ({"group": 64}, "shapes"),
        ({"format": 9}, "unknown"),
        ({"format": -1}, "unknown"),
        ({"format": 3}, "shapes"),
        ({"format": 1}, "unknown"),
        ({"inputs": 128}, "shapes"),
        ({"outputs": 9}, "shapes"),
        ({"dtype": 5}, "dtype"),
    ):
        with pytest.raises(DeviceError, match=message):
            run(own, **change)
    bytes_of_codes = 0, 3  # of those no alignment is asked
    for name, places in (("int4", (0, 1, 2, 4)), ("fp6", (0, 1, 3, 4))):
        own = weight(name, 8, 96)
        for place in places:
            matrix = matrix_of(own)
            assert isinstance(matrix, Matrix)
            for value, message in ((None, "missing"), (matrix.planes[place] + 1, "aligned")):
                if value is None or place not in bytes_of_codes:
                    matrix.planes[place] = value
                    call = LinearCall(x=x.data_ptr(), out=out.data_ptr(), rows=1, dtype=0, weight=matrix)
                    with pytest.raises(DeviceError, match=message):
                        lib.run("linear", call)


def test_a_plane_with_holes_is_no_native_one() -> None:
    codes, factors = weight("int8", 8, 96).planes
    own = Weight("int8", (8, 48), (codes[:, :48], factors), lambda *_: None, None, torch.float32)
    assert "strides" in str(matrix_of(own))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", PACKED)
def test_what_is_registered_takes_many_rows_too(name: str, kernel: Kernel) -> None:
    own = weight(name, 192, 576)
    for rows in (1, 65, 200):
        x = torch.randn(rows, 576)
        got = kernel.run(x, own)
        assert error(got, x, own) <= TOLERANCE[torch.float32]
