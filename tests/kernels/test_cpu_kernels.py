"""Every native kernel agrees with its op's reference: each case, dtype and instruction set at hand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import DeviceError
from slipstream.formats import FORMATS
from slipstream.kernels.cpu import KERNELS, abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.abi import DTYPES, LinearCall, StackCall
from slipstream.kernels.cpu.attention import NativeAttention
from slipstream.kernels.cpu.draw import native_draw
from slipstream.kernels.cpu.feed_forward import KERNELS as FEEDS
from slipstream.kernels.cpu.feed_forward import native_feed_forward
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.kernels.cpu.linear import native_linear, run_linear
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.kernels.cpu.moe import NativeExperts
from slipstream.kernels.cpu.moe import known as prepared_experts
from slipstream.kernels.cpu.norm import native_norm
from slipstream.kernels.cpu.paged_attention import native_paged_attention
from slipstream.ops import OPS
from slipstream.ops.bind import Case, Facts, Kernel
from slipstream.ops.linear import Weight
from slipstream.ops.moe import moe
from slipstream.spec import MoE
from tests.helpers.libraries import library

NATIVE: dict[str, Callable[..., Tensor]] = {
    "attention": lambda library, **given: NativeAttention(library)(**given),
    "draw": native_draw,
    "feed_forward": native_feed_forward,
    "linear": native_linear,
    "norm": native_norm,
    "moe": lambda library, **given: NativeExperts(library.isa)(**given),
    "paged_attention": native_paged_attention,
}
"""What each kernel calls where it does not leave the work to torch."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Beside the reference in double: rounding of the result alone, and of the rows in products of bfloat16."""

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


def double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value.apply(lambda t: t.double()) if isinstance(value, Weight) else value


def compare(case: Case, op: str, dtype: torch.dtype, run: Callable[..., Tensor]) -> None:
    arguments = case.make(torch.Generator().manual_seed(3), dtype)
    expected = OPS[op].reference(**{name: double(value) for name, value in arguments.items()})
    got = run(**arguments)
    if expected.dtype == torch.int64:
        assert torch.equal(got, expected)
        return
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert got.isfinite().all()
    error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert float(error) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op in NATIVE for case in OPS[op].cases],
    ids=lambda v: getattr(v, "name", v),
)
def test_a_kernel_agrees_with_its_reference(op: str, case: Case, isa: str, dtype: torch.dtype) -> None:
    compare(case, op, dtype, lambda **given: NATIVE[op](**given, library=library(isa)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.op} {kernel.name}")
def test_what_is_registered_agrees_as_it_is_called(kernel: Kernel) -> None:
    assert kernel.op in NATIVE or kernel.op == "sample"  # which is `draw` where chance is in it
    for dtype in TOLERANCE:
        for case in OPS[kernel.op].cases:
            compare(case, kernel.op, dtype, kernel.run)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 576, 1536),
        (8, 1536, 576),
        (3, 64, 1000),
        (19, 200, 333),
        # By tiles from four rows on: bands of sixteen outputs, the last of which has less, or there is none.
        (4, 98, 49),
        (32, 32, 15),
        # From 12 rows on a vector holds the same inputs of 16 rows; an odd number of inputs has no pairs.
        (12, 384, 96),
        (16, 33, 64),
        (33, 70, 41),
        (47, 1026, 24),
        # Many rows: packed tokens; more of them than stay near, and inputs that take several passes.
        (300, 70, 40),
        (577, 33, 130),
        (49, 6500, 20),
        (545, 3100, 17),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_of_other_shapes(
    shape: tuple[int, int, int], dtype: torch.dtype, isa: str, transposed: bool
) -> None:
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    matrix = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator)
    matrix = matrix.t().contiguous().t() if transposed else matrix
    weight = Weight("plain", (outputs, inputs), (matrix,), lambda *_: matrix, bias)
    expected = x.double() @ matrix.double().t() + bias.double()
    error = (native_linear(x, weight, library(isa)).double() - expected).abs().max() / expected.abs().max()
    assert float(error) <= TOLERANCE[dtype]


def test_linear_reads_a_view_within_a_larger_matrix() -> None:
    whole = torch.randn(40, 50)
    weight = Weight("plain", (10, 20), (whole[5:15, 3:23],), lambda planes: planes[0])
    x = torch.randn(2, 20)
    got = native_linear(x, weight, library("baseline"))
    torch.testing.assert_close(got, x @ whole[5:15, 3:23].t())


def test_a_strided_matrix_is_no_native_one() -> None:
    weight = Weight("plain", (4, 4), (torch.randn(8, 8)[::2, ::2],), lambda planes: planes[0])
    assert "strides" in str(matrix_of(weight))
    with pytest.raises(ValueError, match="strides"):
        native_linear(torch.randn(1, 4), weight, library("baseline"))


OVERLAPPING: dict[str, Callable[[], Tensor]] = {
    "one row for all": lambda: torch.randn(1, 96).expand(48, 96),
    "rows half over each other": lambda: torch.randn(48 * 48 + 96).as_strided((48, 96), (48, 1)),
    "one column for all": lambda: torch.randn(48, 1).expand(48, 96),
    "columns half over each other": lambda: torch.randn(96 * 24 + 48).as_strided((48, 96), (1, 24)),
    "one number": lambda: torch.randn(1, 1).expand(48, 96),
    "one number in a column": lambda: torch.randn(1, 1).expand(48, 1),
    "one number in a row": lambda: torch.randn(1, 1).expand(1, 96),
}


@pytest.mark.parametrize("rows", [1, 5, 80])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", OVERLAPPING)
def test_rows_that_overlap_are_left_to_torch(kind: str, isa: str, rows: int) -> None:
    library(isa)
    matrix = OVERLAPPING[kind]()
    weight = FORMATS["plain"].weight(matrix, None)
    x = torch.randn(rows, matrix.shape[1])
    with pytest.raises(ValueError, match="overlap|strides"):
        native_linear(x, weight, library(isa))
    torch.testing.assert_close(run_linear(x, weight, isa=isa), x @ matrix.t(), rtol=1e-4, atol=1e-4)
    last = FORMATS["plain"].weight(torch.randn(7, len(matrix)), None)
    feed = next(kernel for kernel in FEEDS if kernel.name == f"cpu-{isa}").run
    given = {"name": "relu", "gated": False}
    got, expected = feed(x, weight, last, **given), OPS["feed_forward"].reference(x, weight, last, **given)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [9, 200])
@pytest.mark.parametrize("widths", [(33, 8, 8), (31, 8, 8), (32, 8, 9), (32, 8, 7)], ids=str)
def test_a_feed_forward_whose_shapes_do_not_follow_each_other_is_torch_s_error(
    widths: tuple[int, int, int], rows: int
) -> None:
    inputs, inner, after = widths
    first, last = (FORMATS["plain"].weight(torch.randn(*s), None) for s in ((2 * inner, 32), (5, after)))
    x, given = torch.randn(rows, inputs), {"name": "silu", "gated": True}
    with pytest.raises(ValueError, match="fit|follow"):
        native_feed_forward(x, first, last, **given, library=library("baseline"))
    for kernel in FEEDS:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            kernel.run(x, first, last, **given)


def test_shapes_that_do_not_fit_are_refused_before_memory_is_touched() -> None:
    weight = Weight("plain", (8, 4), (torch.randn(8, 4),), lambda planes: planes[0])
    matrix = matrix_of(weight)
    assert not isinstance(matrix, str)
    x, lib = torch.randn(1, 4), library("baseline")
    run = abi.Run(x.data_ptr(), 1, (1 << 31) - 1)
    wide = abi.Matrix(runs=ctypes.addressof(run), num_runs=1, outputs=1, inputs=run.stride)
    for change, message in (
        ({"rows": 0}, "shapes"),
        ({"x": None}, "missing"),
        ({"dtype": 9}, "dtype"),
        ({"x": x.data_ptr() + 1}, "aligned"),
        ({"rows": (1 << 31) - 1, "weight": wide}, "shapes"),  # more bytes than a number of 64 bits holds
    ):
        given = {"x": x.data_ptr(), "out": x.data_ptr(), "rows": 1, "dtype": 0, "weight": matrix, **change}
        with pytest.raises(DeviceError, match=message):
            lib.run("linear", LinearCall(**given))
    with pytest.raises(DeviceError, match="shapes"):
        lib.run("stack", StackCall())
    # A turn says in `failed` whether there is a layer.
    with pytest.raises(DeviceError, match="missing"):
        lib.run("stack", StackCall(num_blocks=1, blocks=ctypes.pointer(abi.Block()), turn=1))


def experts_of(count: int = 3, hidden: int = 16, width: int = 8) -> tuple[Weight, Weight]:
    """Gated experts of random numbers."""
    generator = torch.Generator().manual_seed(7)
    matrices = (
        torch.randn(count, *shape, generator=generator) for shape in ((2 * width, hidden), (hidden, width))
    )
    first, last = (Weight("plain", tuple(m.shape), (m,), lambda planes: planes[0]) for m in matrices)
    return first, last


def mixed(
    x: Tensor, first: Weight, last: Weight, isa: str, routed: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The output of the kernel and that of the reference."""
    given = {"spec": MoE(3, 2), "activation": "silu", "gated": True}
    return NativeExperts(isa)(x, routed, first, last, **given), moe(x, routed, first, last, **given)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_experts_run_in_one_call_and_follow_changes_of_their_weights(
    isa: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(isa)
    ran = []
    run = native.Library.run
    monkeypatch.setattr(
        native.Library, "run", lambda self, name, *rest: ran.append(name) or run(self, name, *rest)
    )
    (first, last), x = experts_of(), torch.randn(rows, 16)
    routed = torch.rand(rows, 2), torch.randint(0, 3, (rows, 2))
    for change in (
        lambda: None,
        lambda: first.planes[0].mul_(-2),
        lambda: last.planes[0].set_(last.planes[0] + 1),  # other memory
    ):
        change()
        got, expected = mixed(x, first, last, isa, routed)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert ran == ["experts"] * 3


def test_structs_of_deleted_experts_are_released() -> None:
    (first, last), routed = experts_of(), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))
    before = len(prepared_experts)
    mixed(torch.randn(1, 16), first, last, "baseline", routed)
    assert len(prepared_experts) == before + 1
    del first, last
    assert len(prepared_experts) == before


def test_experts_out_of_range_are_refused_before_memory_is_touched() -> None:
    first, last = experts_of()
    each = [[matrix_of(weight, expert) for expert in range(3)] for weight in (first, last)]
    matrices = [(abi.Matrix * 3)(*structs) for structs in each]
    x, weights, chosen = torch.randn(1, 16), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    lib = library("baseline")

    first_in, last_in = map(ctypes.addressof, matrices)
    fields = {"x": x.data_ptr(), "out": x.data_ptr(), "rows": 1, "hidden": 16, "ffn": 8, "activation": 3}
    fields |= {"gated": 1, "weights": weights.data_ptr(), "chosen": chosen.data_ptr()}
    mixture = {"experts": 3, "top_k": 1, "experts_in": first_in, "experts_out": last_in}

    def run(**change: Any) -> None:
        of_call = {name: value for name, value in change.items() if name in fields}
        call = abi.ExpertsCall(**{**fields, **of_call})
        call.moe = abi.Moe(**{**mixture, **{name: v for name, v in change.items() if name not in fields}})
        lib.run("experts", call)

    for change, message in (
        ({"rows": 0}, "shapes"),
        ({"hidden": 15}, "shapes"),
        ({"top_k": 4}, "shapes"),
        ({"shared": 8}, "shapes"),
        ({"chosen": None}, "option"),
        ({"activation": 99}, "option"),
        ({"experts_out": None}, "missing"),
        ({"x": None}, "missing"),
        ({"weights": weights.data_ptr() + 1}, "aligned"),
        # Where the router chooses, what it chooses by is checked.
        ({"weights": None, "chosen": None, "scoring": 9, "groups": 1, "top_groups": 1}, "option"),
        ({"weights": None, "chosen": None, "groups": 2, "top_groups": 1}, "shapes"),
        ({"weights": None, "chosen": None, "groups": 3, "top_groups": 0}, "shapes"),
        ({"weights": None, "chosen": None, "groups": 3, "top_groups": 2, "sums_two": 1}, "shapes"),
        ({"weights": None, "chosen": None, "groups": 3, "top_groups": 2, "scoring": 1}, "option"),
    ):
        with pytest.raises(DeviceError, match=message):
            run(**change)
    for wrong in (-1, 3):
        chosen.fill_(wrong)
        with pytest.raises(DeviceError, match="outside"):
            run()


def test_a_limit_names_the_best_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, names in (("baseline", {"baseline"}), ("avx2", {"avx2"}), ("reference", set())):
        monkeypatch.setenv("SLIPSTREAM_CPU_ISA", limit)
        facts = Facts(torch.device("cpu"), torch.float32)
        accepted = {kernel.name for kernel in KERNELS if kernel.refuse(facts) is None}
        assert accepted <= {f"cpu-{name}" for name in names}


def test_without_the_file_every_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_find", lambda: "the native library was not built")
    facts = Facts(torch.device("cpu"), torch.float32)
    monkeypatch.delenv("SLIPSTREAM_CPU_ISA", raising=False)
    assert all("not built" in str(kernel.refuse(facts)) for kernel in KERNELS)
    assert load() is None


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("half", [0, 1])
def test_what_is_not_a_number_stays_none_where_it_is_bounded(isa: str, half: int) -> None:
    plain = FORMATS["plain"]
    first = plain.weight(torch.eye(2), None)
    x = torch.ones(2, 2)
    x[0, half] = torch.nan  # of the gate, or of what it is multiplied by
    last = plain.weight(torch.ones(1, 1), None)
    found = native_feed_forward(x, first, last, name="swiglu_oai", gated=True, library=library(isa))
    assert found.isnan().flatten().tolist() == [True, False]


@pytest.mark.parametrize("count", [1, 15])
def test_a_bias_that_torch_would_repeat_is_not_read(count: int) -> None:
    beyond = torch.arange(1.0, 17.0)
    weight = FORMATS["plain"].weight(torch.eye(16), beyond[:count])
    assert f"({count},) with 16 outputs" in str(matrix_of(weight))
    with pytest.raises(ValueError, match="bias"):
        native_linear(torch.ones(1, 16), weight, library("baseline"))
