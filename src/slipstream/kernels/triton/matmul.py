"""`linear` of some rows (five to a few hundred) on the GPU, in every weight format, by the matrix units.

A program owns a tile of rows and outputs and one split of the inputs. Weights are decoded to the dtype of x
on their way; the fields of a byte stand for runs of inputs that lie apart, so each field is one product with
the inputs that it stands for, and nothing is put back into order. Splits are summed in float32, in order, by
a second kernel.

With experts, rows are pairs of token and expert sorted by expert, and every tile of rows belongs to one of
them.

Source: split-K as in Hoque et al. 2024 (arXiv 2402.00025), with a sum in order instead of atomics; tiles of
sorted pairs as in Gale et al. 2022 (arXiv 2211.15841).

Shapes: T rows, I inputs, O outputs, G runs of bytes of a weight's row, E experts, k experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.decode import PARTS, RESCALE, fp6_part, fp8_codes, int8_codes, nibble
from slipstream.kernels.triton.target import Build, Launch, processors

__all__ = ["BUILDS", "planes_of", "tile_rows", "times_matrix"]


@triton.jit
def _inputs_of(x, at_row, real, run, inputs, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """`(ROWS, G * WIDTH)` in the dtype of x: the inputs that part PART of some runs stands for."""
    lane = tl.arange(0, WIDTH)[None, :]
    at = tl.reshape(run[:, None] * (PARTS * WIDTH) + PART * WIDTH + lane, (run.shape[0] * WIDTH,))
    return tl.load(x + at_row[:, None] + at[None, :], mask=real[:, None] & (at < inputs)[None, :], other=0.0)


@triton.jit
def _flat(block):
    """`(OUTPUTS, G, WIDTH)` as `(OUTPUTS, G * WIDTH)`."""
    return tl.reshape(block, (block.shape[0], block.shape[1] * block.shape[2]))


@triton.jit
def _some_rows(
    x,
    codes,
    second,
    third,
    multiplier,
    part,
    row_of,
    expert_of,
    rows,
    inputs,
    outputs,
    runs,
    stride,
    share,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RESCALE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RUNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    # A matrix row's number counts those of the experts before it.
    first = tl.zeros([], tl.int64)
    source = row.to(tl.int64)
    if EXPERTS:
        expert = tl.load(expert_of + tl.program_id(1)).to(tl.int64)
        if expert < 0:
            return
        first = expert * outputs
        row = tl.load(row_of + row)
        source = row.to(tl.int64) // EACH
    real = (row >= 0) & (row < rows)
    there = output < outputs
    matrix_row = first + tl.minimum(output, outputs - 1)
    own = matrix_row[:, None, None] * stride
    lane = tl.arange(0, WIDTH)[None, None, :]
    at_row = tl.maximum(source, 0) * inputs
    kind = x.dtype.element_ty
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for begin in range(split * share, tl.minimum(split * share + share, runs), RUNS):
        run = begin + tl.arange(0, RUNS)
        within = run < runs
        x0 = _inputs_of(x, at_row, real, run, inputs, WIDTH, PARTS, 0)
        if FORMAT <= 2:
            inside = within[None, :, None] & (run[None, :, None] * WIDTH + lane < inputs)
            raw = tl.load(codes + own + run[None, :, None] * WIDTH + lane, mask=inside, other=0)
            if FORMAT == 0:
                weights = raw.to(kind)
            elif FORMAT == 1:
                weights = int8_codes(raw).to(kind)
            else:
                weights = fp8_codes(raw).to(kind)
            sums = tl.dot(_flat(weights), tl.trans(x0), sums, input_precision="ieee")
        elif FORMAT <= 4:
            raw = tl.load(
                codes + own + run[None, :, None] * WIDTH + lane, mask=within[None, :, None], other=0
            )
            middle: tl.constexpr = 8.0 if FORMAT == 4 else 0.0
            group = matrix_row[:, None] * (runs // BLOCKS) + (run // BLOCKS)[None, :]
            scale = tl.load(second + group, mask=within[None, :], other=0.0).to(tl.float32)[:, :, None]
            low = nibble(raw, False, middle) * scale
            high = nibble(raw, True, middle) * scale
            if FORMAT == 3:
                minimum = tl.load(third + group, mask=within[None, :], other=0.0).to(tl.float32)[:, :, None]
                low += minimum
                high += minimum
            x1 = _inputs_of(x, at_row, real, run, inputs, WIDTH, PARTS, 1)
            sums = tl.dot(_flat(low.to(kind)), tl.trans(x0), sums, input_precision="ieee")
            sums = tl.dot(_flat(high.to(kind)), tl.trans(x1), sums, input_precision="ieee")
        else:
            at = own * 2 + run[None, :, None] * (2 * WIDTH) + lane
            left = tl.load(codes + at, mask=within[None, :, None], other=0)
            right = tl.load(codes + at + WIDTH, mask=within[None, :, None], other=0)
            bits = tl.load(
                second + own + run[None, :, None] * WIDTH + lane, mask=within[None, :, None], other=0
            )
            e3m2: tl.constexpr = FORMAT == 6
            sums = tl.dot(
                _flat(fp6_part(left, bits, 0, e3m2).to(kind)), tl.trans(x0), sums, input_precision="ieee"
            )
            x1 = _inputs_of(x, at_row, real, run, inputs, WIDTH, PARTS, 1)
            sums = tl.dot(
                _flat(fp6_part(left, bits, 1, e3m2).to(kind)), tl.trans(x1), sums, input_precision="ieee"
            )
            x2 = _inputs_of(x, at_row, real, run, inputs, WIDTH, PARTS, 2)
            sums = tl.dot(
                _flat(fp6_part(right, bits, 2, e3m2).to(kind)), tl.trans(x2), sums, input_precision="ieee"
            )
            x3 = _inputs_of(x, at_row, real, run, inputs, WIDTH, PARTS, 3)
            sums = tl.dot(
                _flat(fp6_part(right, bits, 3, e3m2).to(kind)), tl.trans(x3), sums, input_precision="ieee"
            )

    if FORMAT > 0:
        sums = sums * (tl.load(multiplier + matrix_row) * RESCALE)[:, None]
    place = (split * rows + row.to(tl.int64))[None, :] * outputs + output[:, None]
    tl.store(part + place, sums, mask=there[:, None] & real[None, :])


@triton.jit
def _sum_splits(
    part,
    bias,
    expert_of_row,
    out,
    rows,
    outputs,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = output < outputs
    y = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        y += tl.load(part + (split * rows + row) * outputs + output, mask=there, other=0.0)
    if HAS_BIAS:
        first = tl.load(expert_of_row + row).to(tl.int64) * outputs if EXPERTS else 0
        y += tl.load(bias + first + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, y.to(out.dtype.element_ty), mask=there)


def tile_rows(rows: int) -> int:
    """Rows of one tile: a matrix unit has at least sixteen."""
    return min(max(int(triton.next_power_of_2(rows)), 16), 64)


def _launch_of(kind: int, itemsize: int, rows: int) -> Launch:
    width = 16 // itemsize if kind == 0 else 16
    # 64 inputs of a field at a time.
    sizes = {"ROWS": rows, "OUTPUTS": 64, "RUNS": 64 // width, "WIDTH": width}
    # What is decoded lies in registers: with four warps 64 rows spill on sm_80.
    return Launch(sizes, warps=8 if kind >= 3 and rows >= 64 else 4, stages=4 if kind < 3 else 3)


def _splits(tiles: int, runs: int, each: int, device: torch.device) -> int:
    """Splits of the inputs that give every processor two programs, each of at least four steps."""
    wanted = -(-2 * processors(device) // tiles)
    return max(min(wanted, runs // (4 * each), 16), 1)


def planes_of(planes: list[Tensor], kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, second and third plane and multipliers of rows; what a format lacks is never read."""
    codes = planes[0].view(torch.uint8) if kind == 1 else planes[0]
    second = planes[1] if kind >= 3 else codes
    return codes, second, planes[2] if kind == 3 else codes, codes if kind == 0 else planes[-1]


def times_matrix(
    x: Tensor,
    planes: list[Tensor],
    bias: Tensor | None,
    kind: int,
    blocks: int,
    shape: tuple[int, int],
    pairs: tuple[Tensor, Tensor, Tensor, int] | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, for each row or for each pair of a row and an expert.

    Args:
        x: `(T, I)`, contiguous.
        planes: Of the weight, `(O, n)` or `(E, O, n)` each, contiguous.
        bias: `(O,)` or `(E, O)`, or None.
        kind: Number of the weight format.
        blocks: Blocks of 32 inputs in one of its groups.
        shape: O, and how many consecutive pairs share a row of x (1 without experts).
        pairs: Pairs sorted by expert and padded to whole tiles, `(tiles * rows,)` int32 with -1 for padding;
            the expert of each tile, `(tiles,)` int32, -1 for none; the expert of each pair, `(pairs,)`; and
            rows of a tile.

    Returns:
        `(T, O)` or `(pairs, O)` in the dtype of x, pairs in their own order.
    """
    outputs, each = shape
    inputs = x.shape[1]
    rows = x.shape[0] if pairs is None else pairs[2].shape[0]
    height = tile_rows(rows) if pairs is None else pairs[3]
    tiles = triton.cdiv(rows, height) if pairs is None else pairs[1].shape[0]
    codes = planes[0]
    launch = _launch_of(kind, codes.element_size(), height)
    width, step = launch.sizes["WIDTH"], launch.sizes["RUNS"]
    stride = codes.stride(-2) if kind == 0 else codes.shape[-1] // (2 if kind >= 5 else 1)
    runs = -(-inputs // width) if kind <= 2 else stride // width
    columns = triton.cdiv(outputs, launch.sizes["OUTPUTS"])
    splits = _splits(columns * tiles, runs, step, x.device)
    share = triton.cdiv(triton.cdiv(runs, splits), step) * step
    part = x.new_empty((splits, rows, outputs), dtype=torch.float32)
    _some_rows[(columns, tiles, splits)](
        x,
        *planes_of(planes, kind),
        part,
        *((part, part) if pairs is None else pairs[:2]),
        rows,
        inputs,
        outputs,
        runs,
        stride,
        share,
        FORMAT=kind,
        PARTS=PARTS[kind],
        BLOCKS=blocks,
        RESCALE=RESCALE[kind],
        EXPERTS=pairs is not None,
        EACH=each,
        **launch.options(),
    )
    return _joined(part, bias, None if pairs is None else pairs[2], x.dtype)


def _joined(part: Tensor, bias: Tensor | None, expert_of_row: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum the splits `(splits, T, O)` and add the bias."""
    splits, rows, outputs = part.shape
    out = part.new_empty(rows, outputs, dtype=dtype)
    _sum_splits[(triton.cdiv(outputs, 1024), rows)](
        part,
        part if bias is None else bias,
        part if expert_of_row is None else expert_of_row,
        out,
        rows,
        outputs,
        HAS_BIAS=bias is not None,
        EXPERTS=expert_of_row is not None,
        SPLITS=splits,
        BLOCK=1024,
        num_warps=4,
    )
    return out


def _build(name: str, kind: int, rows: int, *, experts: bool = False) -> Build:
    types = {
        "x": "*bf16",
        "codes": "*bf16" if kind == 0 else "*u8",
        "second": "*u8" if kind >= 5 else "*fp16",
    }
    types |= {"third": "*fp16", "multiplier": "*fp32", "part": "*fp32", "row_of": "*i32", "expert_of": "*i32"}
    types |= dict.fromkeys(("rows", "inputs", "outputs", "runs", "stride", "share"), "i32")
    constants = {"FORMAT": kind, "PARTS": PARTS[kind], "BLOCKS": 1, "RESCALE": RESCALE[kind]}
    return Build(
        f"matmul, {name}, {rows} rows{', experts' if experts else ''}",
        _some_rows,
        types | constants | {"EXPERTS": experts, "EACH": 2},
        _launch_of(kind, 2, rows),
        frozenset({"inputs", "outputs", "runs", "stride", "share"}),
        wide_loads=2,
    )


BUILDS = (
    _build("plain", 0, 16),
    _build("plain", 0, 64),
    _build("plain", 0, 16, experts=True),
    _build("int8", 1, 16),
    _build("fp8", 2, 16),
    _build("int4", 3, 16),
    _build("int4", 3, 64),
    _build("int4", 3, 16, experts=True),
    _build("fp6", 5, 16),
)
