"""`linear` of some rows (two to `linear.MOST_ROWS`) on the GPU, in every weight format, by the matrix units.

A program owns a tile of rows and outputs and one split of the inputs. Weights are decoded to the dtype of x
on the fly; the fields of a byte belong to runs of inputs that lie apart, so each field is multiplied with the
inputs that it belongs to, and nothing is reordered. A second kernel sums the splits in float32, in order.

With experts, rows are pairs of token and expert sorted by expert, and every tile of rows belongs to one
expert.

Source: split-K as in Hoque et al. 2024 (arXiv 2402.00025), with a sum in order instead of atomics; tiles of
sorted pairs as in Gale et al. 2022 (arXiv 2211.15841).

Shapes: T rows, I inputs, O outputs, G runs of bytes of a weight's row, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.activation import apply, gate
from slipstream.kernels.triton.decode import RESCALE, kind_of, name_of
from slipstream.kernels.triton.operands import Around, Matrix, planes_of
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Bucket, Build, Launch, by_hand, generation, processors
from slipstream.kernels.triton.tile import weights_at

__all__ = ["BUILDS", "Pairs", "build_of", "tile_rows", "times_matrix"]

_LEAST, _MOST = 3, 6
"""Concurrent programs per multiprocessor: fewer leave it waiting, more do not fit."""

_LAUNCH = Launch({"BLOCK": 1024}, warps=4)
_BUCKET = Bucket("sum of splits", "any", {"BLOCK": (256, 512, 1024, 2048)})


@dataclass(frozen=True)
class Pairs:
    """Pairs of token and expert, sorted by expert and padded to whole tiles of one expert each.

    Attributes:
        row_of: `(tiles * height,)` int32, the pair of each row of the tiles; -1 for padding.
        expert_of: `(tiles,)` int32, the expert of each tile; -1 for none.
        expert_of_pair: `(pairs,)` int32.
        height: Number of rows per tile.
    """

    row_of: Tensor
    expert_of: Tensor
    expert_of_pair: Tensor
    height: int


@triton.jit
def _inputs_of(
    x, at_row, real, begin, inputs,
    BYTES: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr, FIELD: tl.constexpr,
):  # fmt: skip
    """Load the inputs `(ROWS, BYTES)` that field FIELD of the bytes from run `begin` on belongs to."""
    # Written so that the compiler sees which inputs are contiguous; it would load them one by one otherwise.
    lane = tl.arange(0, BYTES)
    at = begin * (FIELDS * WIDTH) + FIELD * WIDTH + (lane // WIDTH) * (FIELDS * WIDTH) + lane % WIDTH
    return tl.load(x + at_row[:, None] + at[None, :], mask=real[:, None] & (at < inputs)[None, :], other=0.0)


@triton.jit
def _rows_of(row_of, expert_of, rows, outputs, EXPERTS: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's rows, which of them are real, the rows of x they read, and their matrix's first row."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    source = row.to(tl.int64)
    # Matrix rows are numbered across all experts.
    first = tl.zeros([], tl.int64)
    real = row < rows
    if EXPERTS:
        expert = tl.load(expert_of + tl.program_id(1)).to(tl.int64)
        row = tl.load(row_of + row)
        real = (row >= 0) & (row < rows) & (expert >= 0)
        source = row.to(tl.int64) // EACH
        first = tl.maximum(expert, 0) * outputs
    return row, real, tl.maximum(source, 0), first


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def _some_rows(
    x, codes, second, third, multiplier, part, row_of, expert_of,
    rows, inputs, outputs, runs, stride, share,
    FORMAT: tl.constexpr, FIELDS: tl.constexpr, BLOCKS: tl.constexpr, LIFT: tl.constexpr,
    RESCALE: tl.constexpr, EXPERTS: tl.constexpr, EACH: tl.constexpr, HAND: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    if EXPERTS:  # noqa: SIM102 - without experts there is nothing to load, which `and` would not prevent
        if tl.load(expert_of + tl.program_id(1)) < 0:
            return
    row, real, source, before = _rows_of(row_of, expert_of, rows, outputs, EXPERTS, EACH, ROWS)
    matrix_row = before + tl.minimum(output, outputs - 1)
    kind = x.dtype.element_ty
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for begin in range(split * share, tl.minimum(split * share + share, runs), RUNS):
        weights = weights_at(
            codes, second, third, matrix_row, begin, stride, inputs, runs,
            FORMAT, FIELDS, BLOCKS, LIFT, HAND, kind, RUNS, WIDTH,
        )  # fmt: skip
        for field in tl.static_range(FIELDS):
            inside = _inputs_of(x, source * inputs, real, begin, inputs, RUNS * WIDTH, WIDTH, FIELDS, field)
            sums = tl.dot(weights[field], tl.trans(inside), sums, input_precision="ieee")

    if FORMAT > 0:
        sums = sums * (tl.load(multiplier + matrix_row) * RESCALE)[:, None]
    place = (split * rows + row.to(tl.int64))[None, :] * outputs + output[:, None]
    tl.store(part + place, sums, mask=(output < outputs)[:, None] & real[None, :])


@triton.jit
def _summed(part, bias, first, row, rows, outputs, output, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr):
    """Sum the splits of some outputs of one row, in order, and add the bias."""
    there = output < outputs
    y = tl.zeros(output.shape, tl.float32)
    for split in range(SPLITS):
        y += tl.load(part + (split * rows + row) * outputs + output, mask=there, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + first + output, mask=there, other=0.0).to(tl.float32)
    return y


@triton.jit
def _sum_splits(
    part, bias, expert_of_row, residual, out, rows, outputs, factor,
    HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = outputs // 2 if GATED else outputs
    first = tl.load(expert_of_row + row).to(tl.int64) * outputs if EXPERTS else 0
    y = _summed(part, bias, first, row, rows, outputs, output, HAS_BIAS, SPLITS)
    if GATED:
        up = _summed(part, bias, first, row, rows, outputs, output + width, HAS_BIAS, SPLITS)
        y = gate(y, up, ACTIVATION)
    elif ACTIVATION >= 0:
        y = apply(y, ACTIVATION)
    place = row * width + output
    there = output < width
    if HAS_RESIDUAL:
        y = tl.load(residual + place, mask=there, other=0.0).to(tl.float32) + factor * y
    tl.store(out + place, y.to(out.dtype.element_ty), mask=there)


def _fields(kind: int) -> int:
    """Return how many runs of inputs one run of bytes of the first plane holds."""
    return 2 if kind >= 3 else 1


def _factors(kind: int, dtype: torch.dtype, *, hand: bool) -> dict[str, float]:
    """Return the factors that correct decoded exponents: of fp6 scales (LIFT) and of the sums (RESCALE).

    With NVIDIA's instructions (`hand`) in bfloat16, one product applies a scale and corrects the exponent
    (`fields`), which is off by 126 (e2m3) or 124 (e3m2): LIFT is as much of that as leaves room for the
    largest scale. In float16 nothing may be left for the sums, as a weight at 2^-14 of its value would have
    lost bits.

    A scale is first rounded to the 8 bits of bfloat16, and its product with a code once more, by at most 2^-8
    each; the weights of a model in bfloat16 are rounded once, and codes by 2^-4. On random numbers results
    have a relative error of 2.8e-3; with weights rounded once 2.3e-3, with unrounded weights 1.7e-3.
    """
    if hand:
        whole = kind < 5 or dtype != torch.bfloat16
        return {"LIFT": 1.0 if whole else 2.0**112, "RESCALE": 1.0 if whole else RESCALE[kind]}
    return {"LIFT": RESCALE[kind], "RESCALE": 1.0} if kind >= 5 else {"LIFT": 1.0, "RESCALE": RESCALE[kind]}


def tile_rows(rows: int) -> int:
    """Return the number of rows per tile; a matrix unit takes at least sixteen."""
    return min(max(int(triton.next_power_of_2(rows)), 16), 64)


def _form(kind: int, itemsize: int, rows: int, *, experts: bool, hand: bool) -> tuple[Bucket, Launch]:
    width = 16 // itemsize if kind == 0 else 16
    # 128 bytes of a row at a time, half as many where decoded weights, or x, would take too much room.
    step = 128 if kind == 0 or (hand and (kind < 3 or (kind < 5 and rows < 32))) else 64
    sizes = {"ROWS": rows, "OUTPUTS": 64, "RUNS": step // itemsize // width if kind == 0 else step // width}
    # Up to 32 rows, each of two warps has 32 outputs and reads four bytes of a weight's row at once from
    # shared memory; four warps multiply as one, and read two. Without `hand`, 64 rows spill with four warps.
    warps = 2 if hand and rows < 64 else 8 if not hand and kind >= 3 and rows >= 64 else 4
    stages = 5 if hand and kind < 3 and rows < 32 else 4 if hand or kind < 3 else 3
    launch = Launch({**sizes, "WIDTH": width}, warps=warps, stages=stages)
    shape = (
        f"{name_of(kind)}{', float32' if itemsize > 2 else ''}, {rows} rows{', experts' if experts else ''}"
    )
    runs = (32 // width, 64 // width, 128 // width) if kind == 0 else (4, 8, 16)
    choices = {"OUTPUTS": (32, 64, 128), "RUNS": runs}
    return Bucket("matmul", shape, choices, warps=(1, 2, 4, 8), stages=(3, 4, 5, 6, 8)), launch


def _splits(tiles: int, steps: int, device: torch.device) -> int:
    """Return the number of splits of the inputs, each of at least four steps.

    A multiprocessor runs whole programs, and each costs about two steps in addition to its own.
    """

    def time(splits: int) -> int:
        each = -(-tiles * splits // processors(device))
        return max(each, _LEAST) * (-(-steps // splits) + 2)

    allowed = [s for s in range(1, min(steps // 4, 16) + 1) if tiles * s <= _MOST * processors(device)]
    return min(allowed, key=time, default=1)


def times_matrix(
    x: Tensor, matrix: Matrix, around: Around, *, pairs: Pairs | None = None, each: int = 1
) -> Tensor:
    """Multiply each row, or each pair of row and expert, by a matrix, including what follows the matrix.

    Args:
        x: `(T, I)`, contiguous.
        matrix: `(O, I)` or `(E, O, I)`, its planes contiguous.
        around: Activation and residual; a norm must have been applied already.
        pairs: The pairs of row and expert, where there are experts.
        each: How many consecutive pairs share a row of x.

    Returns:
        `(T, O)` or `(pairs, O)` (half of O where gated) in the dtype of x, pairs in their own order.
    """
    kind, outputs, codes, inputs = matrix.kind, matrix.outputs, matrix.planes[0], x.shape[1]
    rows = x.shape[0] if pairs is None else pairs.expert_of_pair.shape[0]
    height = tile_rows(rows) if pairs is None else pairs.height
    tiles = triton.cdiv(rows, height) if pairs is None else pairs.expert_of.shape[0]
    number = generation(x.device)
    hand = kind > 0 and x.element_size() == 2 and by_hand(number)
    form = _form(kind, x.element_size(), height, experts=pairs is not None, hand=hand)
    launch = launched(*form, number)
    width, step = launch.sizes["WIDTH"], launch.sizes["RUNS"]
    stride = codes.shape[-1] // (2 if kind >= 5 else 1)
    runs = -(-inputs // width) if kind <= 2 else codes.shape[-1] // width
    columns = triton.cdiv(outputs, launch.sizes["OUTPUTS"])
    splits = _splits(columns * tiles, triton.cdiv(runs, step), x.device)
    share = triton.cdiv(triton.cdiv(runs, splits), step) * step
    part = x.new_empty((splits, rows, outputs), dtype=torch.float32)
    _some_rows[(columns, tiles, splits)](
        x,
        *planes_of(matrix.planes, kind),
        part,
        *((part, part) if pairs is None else (pairs.row_of, pairs.expert_of)),
        *(rows, inputs, outputs, runs, stride, share),
        FORMAT=kind,
        FIELDS=_fields(kind),
        BLOCKS=matrix.blocks,
        **_factors(kind, x.dtype, hand=hand),
        EXPERTS=pairs is not None,
        EACH=each,
        HAND=hand,
        **launch.options(),
    )
    return _joined(part, matrix.bias, None if pairs is None else pairs.expert_of_pair, around, x.dtype)


def _joined(
    part: Tensor, bias: Tensor | None, expert_of_row: Tensor | None, around: Around, dtype: torch.dtype
) -> Tensor:
    """Sum the splits `(splits, T, O)`, add the bias, and apply activation and residual."""
    splits, rows, outputs = part.shape
    width = outputs // 2 if around.gated else outputs
    out = part.new_empty(rows, width, dtype=dtype)
    optional = (bias, expert_of_row, around.residual)
    # Only a grid's first dimension may exceed 65535, as the number of pairs of token and expert can.
    number = generation(part.device)
    launch = launched(_BUCKET, _LAUNCH, number)
    _sum_splits[(rows, triton.cdiv(width, launch.sizes["BLOCK"]))](
        part,
        *(part if tensor is None else tensor for tensor in optional),
        out,
        *(rows, outputs, around.factor),
        HAS_BIAS=bias is not None,
        EXPERTS=expert_of_row is not None,
        HAS_RESIDUAL=around.residual is not None,
        ACTIVATION=around.activation,
        GATED=around.gated,
        SPLITS=splits,
        **launch.options(),
    )
    return out


def build_of(name: str, kind: int, rows: int, *, experts: bool = False, hand: bool = False) -> Build:
    """Return the build for a format, given by name and number, and for tiles of some rows."""
    types = {
        "x": "*bf16",
        "codes": "*bf16" if kind == 0 else "*u8",
        "second": "*u8" if kind >= 5 else "*fp16",
    }
    types |= {"third": "*fp16", "multiplier": "*fp32", "part": "*fp32", "row_of": "*i32", "expert_of": "*i32"}
    types |= dict.fromkeys(("rows", "inputs", "outputs", "runs", "stride", "share"), "i32")
    constants: dict[str, float] = {"FORMAT": kind, "FIELDS": _fields(kind), "HAND": hand}
    constants |= {"BLOCKS": (kind_of(name) or (0, 1))[1], **_factors(kind, torch.bfloat16, hand=hand)}
    bucket, launch = _form(kind, 2, rows, experts=experts, hand=hand)
    return Build(
        f"matmul, {name}, {rows} rows{', experts' if experts else ''}{', by hand' if hand else ''}",
        _some_rows,
        types | constants | {"EXPERTS": experts, "EACH": 2},
        launch,
        frozenset({"inputs", "outputs", "runs", "stride", "share"}),
        wide_loads=2,
        targets=("sm_80", "sm_90") if hand else ("sm_80", "sm_90", "gfx942"),
        bucket=bucket if hand or kind == 0 else None,
    )


_SUMMED = {
    **dict.fromkeys(("part", "bias", "expert_of_row"), "*fp32"),
    "residual": "*bf16",
    "out": "*bf16",
    "rows": "i32",
    "outputs": "i32",
    "factor": "fp32",
    "HAS_BIAS": False,
    "EXPERTS": False,
    "HAS_RESIDUAL": True,
    "ACTIVATION": 3,
    "GATED": True,
    "SPLITS": 4,
}

BUILDS = (
    Build(
        "matmul, sum of splits, gate and residual",
        _sum_splits,
        _SUMMED,
        _LAUNCH,
        frozenset({"rows", "outputs"}),
        wide_loads=1,
        bucket=_BUCKET,
    ),
    build_of("plain", 0, 16),
    build_of("plain", 0, 64),
    build_of("plain", 0, 16, experts=True),
    build_of("int8", 1, 16),
    build_of("int8", 1, 16, hand=True),
    build_of("int8", 1, 32, hand=True),
    build_of("fp8", 2, 16),
    build_of("fp8", 2, 16, hand=True),
    build_of("int4", 3, 16),
    build_of("int4", 3, 64),
    build_of("int4", 3, 16, hand=True),
    build_of("int4", 3, 32, hand=True),
    build_of("int4", 3, 64, hand=True),
    build_of("int4", 3, 16, experts=True),
    build_of("int4", 3, 16, experts=True, hand=True),
    build_of("fp6", 5, 16),
    build_of("fp6", 5, 16, hand=True),
    build_of("fp6", 5, 64, hand=True),
)
