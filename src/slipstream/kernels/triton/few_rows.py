"""Up to four rows times a matrix in any weight format, with what stands before and after it in a layer.

A program owns some outputs and walks over all inputs, 16 bytes of a row per thread and load; the rows of x
share what was decoded, and products are summed in float32. A norm before the matrix needs no launch of its
own: of an RMS norm each program sums up the squares as it goes, for the root is one factor per row; a layer
norm's mean and root are taken first. After it come bias, activation (of gate and up, whose rows a program
takes in pairs), and the residual.

Source: the split of a row over the threads of a program as in GemLite's GEMV (arXiv 2402.00025 for splitting
further).

Shapes: T rows, I inputs, O outputs of the matrix, G runs of bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.activation import apply, gate
from slipstream.kernels.triton.decode import (
    FORMATS,
    PARTS,
    RESCALE,
    codes_at,
    decoded,
    group_at,
    kind_of,
    name_of,
)
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Bucket, Build, Launch, generation, interpreted

__all__ = ["BUILDS", "FEW_ROWS", "Around", "Matrix", "build_of", "planes_of", "times_few"]

FEW_ROWS = 4
"""Rows up to which a program can keep all of them beside the weights that it decodes."""


@triton.jit
def _vector_at(x, run, inputs, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """`(1, G, WIDTH)` float32 of a vector over the inputs: what part PART of some runs stands for."""
    at = run[None, :, None] * (PARTS * WIDTH) + PART * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    return tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32)


@triton.jit
def _inputs_at(
    x, inputs, rows, run, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr
):
    """`(ROWS, G, WIDTH)` float32: the inputs that part PART of some runs stands for, zero beyond the end."""
    row = tl.arange(0, ROWS)[:, None, None]
    at = run[None, :, None] * (PARTS * WIDTH) + PART * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    return tl.load(x + row * inputs + at, mask=(at < inputs) & (row < rows), other=0.0).to(tl.float32)


@triton.jit
def _statistics(x, inputs, rows, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and reciprocal root of the variance of each row, `(ROWS, 1, 1)` each."""
    row = tl.arange(0, ROWS)[:, None]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, inputs, BLOCK):
        at = begin + tl.arange(0, BLOCK)[None, :]
        sums += tl.load(x + row * inputs + at, mask=(at < inputs) & (row < rows), other=0.0).to(tl.float32)
    mean = tl.sum(sums, 1)[:, None] / inputs
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, inputs, BLOCK):
        at = begin + tl.arange(0, BLOCK)[None, :]
        inside = (at < inputs) & (row < rows)
        off = tl.load(x + row * inputs + at, mask=inside, other=0.0).to(tl.float32) - mean
        squares += tl.where(inside, off * off, 0.0)
    root = tl.rsqrt(tl.sum(squares, 1)[:, None] / inputs + eps)
    return mean[:, :, None], root[:, :, None]


@triton.jit
def _normed(
    x, gain, shift, mean, root, offset, inputs, run,
    LAYER: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Inputs `(ROWS, G, WIDTH)` as a norm hands them on; of an RMS norm without its root."""
    width: tl.constexpr = x.shape[2]
    y = x
    if LAYER:
        at = run[None, :, None] * (PARTS * width) + PART * width + tl.arange(0, width)[None, None, :]
        y = tl.where(at < inputs, (y - mean) * root, 0.0)
    if HAS_GAIN:
        y = y * (_vector_at(gain, run, inputs, width, PARTS, PART) + offset)
    if HAS_SHIFT:
        y = y + _vector_at(shift, run, inputs, width, PARTS, PART)
    return y


@triton.jit
def _store(
    y, residual, out, factor, rows, outputs, index, real,
    HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Finish `(ROWS, OUTPUTS)` and store them; gate and up lie side by side in it."""
    count: tl.constexpr = y.shape[0]
    half: tl.constexpr = y.shape[1] // 2
    width = outputs
    if GATED:
        first, second = tl.split(tl.reshape(y, (count, half, 2)))
        y = gate(first, second, ACTIVATION)
        index = tl.program_id(0) * half + tl.arange(0, half)
        width = outputs // 2
        real = index < width
    elif ACTIVATION >= 0:
        y = apply(y, ACTIVATION)
    row = tl.arange(0, count)[:, None]
    place = row * width + index[None, :]
    there = (row < rows) & real[None, :]
    if HAS_RESIDUAL:
        y = tl.load(residual + place, mask=there, other=0.0).to(tl.float32) + factor * y
    tl.store(out + place, y.to(out.dtype.element_ty), mask=there)


# The arguments of a launch are what the host hands over, in registers that the driver fills; one each.
@triton.jit
def _few_rows(
    x, codes, second, third, multiplier, bias, gain, shift, residual, out,
    rows, inputs, outputs, runs, stride, eps, offset, factor,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, RESCALE: tl.constexpr,
    NORM: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = index < outputs
    output = index
    if GATED:
        output = index // 2 + (index % 2) * (outputs // 2)
    own = output.to(tl.int64)[:, None, None] * stride
    if NORM == 2:
        mean, root = _statistics(x, inputs, rows, eps, ROWS, RUNS * WIDTH)
    else:
        mean, root = 0.0, 1.0
    sums = tl.zeros([ROWS, OUTPUTS, RUNS], tl.float32)
    squares = tl.zeros([ROWS, RUNS], tl.float32)
    for begin in range(0, runs, RUNS):
        run = begin + tl.arange(0, RUNS)
        there = real[:, None] & (run < runs)[None, :]
        first, other, high = codes_at(codes, second, own, run, there, inputs, WIDTH, FORMAT)
        if FORMAT == 3 or FORMAT == 4:
            scale, minimum = group_at(second, third, output.to(tl.int64), run, runs, there, BLOCKS, FORMAT)
        for part in tl.static_range(PARTS):
            inside = _inputs_at(x, inputs, rows, run, ROWS, WIDTH, PARTS, part)
            if NORM == 1:
                squares += tl.sum(inside * inside, 2)
            if NORM > 0:
                inside = _normed(
                    inside, gain, shift, mean, root, offset, inputs, run, NORM == 2, HAS_GAIN, HAS_SHIFT,
                    PARTS, part,
                )  # fmt: skip
            found = tl.sum(inside[:, None] * decoded(first, other, high, part, FORMAT)[None], 3)
            if FORMAT == 3 or FORMAT == 4:
                found = found * scale[None]
            if FORMAT == 3:
                found += tl.sum(inside, 2)[:, None] * minimum[None]
            sums += found

    y = tl.sum(sums, 2)
    if FORMAT > 0:
        y = y * (tl.load(multiplier + output, mask=real, other=0.0) * RESCALE)[None, :]
    if NORM == 1:
        y = y * tl.rsqrt(tl.sum(squares, 1) / inputs + eps)[:, None]
    if HAS_BIAS:
        y += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    _store(y, residual, out, factor, rows, outputs, index, real, HAS_RESIDUAL, ACTIVATION, GATED)


@dataclass(frozen=True)
class Matrix:
    """A matrix as a kernel takes it.

    Attributes:
        planes: `(O, n)` each, or `(E, O, n)`.
        bias: `(O,)` or `(E, O)`, or None.
        kind: Number of the weight format.
        blocks: Blocks of 32 inputs in one of its groups.
        outputs: O.
    """

    planes: list[Tensor]
    bias: Tensor | None
    kind: int
    blocks: int
    outputs: int


@dataclass(frozen=True)
class Around:
    """What stands before and after a matrix.

    Attributes:
        norm: 0 for none, 1 for an RMS norm, 2 for a layer norm.
        eps: Of the norm.
        offset: Added to its weight.
        gain: Its weight, `(I,)`, or None.
        shift: Its bias, `(I,)`, of a layer norm; or None.
        activation: A number of `ops.activation.KINDS`, -1 for none.
        gated: The matrix is `[gate | up]`.
        residual: `(T, O)` or, where gated, `(T, O / 2)`; or None.
        factor: Multiplies what is added to the residual.
    """

    norm: int = 0
    eps: float = 0.0
    offset: float = 0.0
    gain: Tensor | None = None
    shift: Tensor | None = None
    activation: int = -1
    gated: bool = False
    residual: Tensor | None = None
    factor: float = 1.0


def planes_of(planes: list[Tensor], kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, second and third plane and multipliers of rows; what a format lacks is never read."""
    codes = planes[0].view(torch.uint8) if kind == 1 else planes[0]
    second = planes[1] if kind >= 3 else codes
    return codes, second, planes[2] if kind == 3 else codes, codes if kind == 0 else planes[-1]


def _form(kind: int, itemsize: int, rows: int, around: Around, outputs_of_all: int) -> tuple[Bucket, Launch]:
    """Outputs and runs of bytes per program: the more rows of x, the fewer outputs fit into registers."""
    width = 16 // itemsize if kind == 0 else 16
    padded = int(triton.next_power_of_2(rows))
    outputs = max(4 // padded, 2 if around.gated else 1)
    if interpreted():
        outputs *= 16  # there a program costs more than what it computes
    runs = 128 if kind < 5 else 64
    # With a norm, twice as many spill on sm_80: of fp6, and of int4 for more than two rows by Triton 3.6.
    if around.norm and (kind >= 5 or (kind >= 3 and padded > 2)):
        runs //= 2
    sizes = {"ROWS": padded, "OUTPUTS": outputs, "RUNS": runs, "WIDTH": width}
    launch = Launch(sizes, warps=4, stages=3 if kind < 5 else 2)
    return _bucket(name_of(kind), itemsize, padded, around, outputs_of_all), launch


def _bucket(name: str, itemsize: int, rows: int, around: Around, outputs: int) -> Bucket:
    shape = f"{name}{', float32' if itemsize > 2 else ''}, {rows} row{'s' if rows > 1 else ''}"
    shape += ("", ", norm", ", layer norm")[around.norm] + (", gate" if around.gated else "")
    # Of a narrow matrix programs are few, and each had better be small.
    shape += ", up to 4096 outputs" if outputs <= 4096 else ""
    choices = {"OUTPUTS": (2, 4, 8) if around.gated else (1, 2, 4, 8), "RUNS": (32, 64, 128, 256)}
    return Bucket("few rows", shape, choices, stages=(1, 2, 3, 4))


def times_few(x: Tensor, matrix: Matrix, around: Around) -> Tensor:
    """Return what a matrix, and what stands around it, makes of up to `FEW_ROWS` rows.

    Args:
        x: `(T, I)`, contiguous.
        matrix: `(O, I)`.
        around: Norm before; activation and residual after.

    Returns:
        `(T, O)`, or `(T, O / 2)` where gated, in the dtype of x.
    """
    rows, inputs = x.shape
    kind, outputs, codes = matrix.kind, matrix.outputs, matrix.planes[0]
    out = x.new_empty(rows, outputs // 2 if around.gated else outputs)
    form = _form(kind, x.element_size(), rows, around, outputs)
    launch = launched(*form, generation(x.device))
    width = launch.sizes["WIDTH"]
    stride = codes.stride(0) if kind == 0 else codes.shape[-1] // (2 if kind >= 5 else 1)
    optional = (matrix.bias, around.gain, around.shift, around.residual)
    _few_rows[(triton.cdiv(outputs, launch.sizes["OUTPUTS"]),)](
        x,
        *planes_of(matrix.planes, kind),
        *(x if tensor is None else tensor for tensor in optional),
        out,
        *(rows, inputs, outputs, -(-inputs // width) if kind <= 2 else stride // width, stride),
        *(around.eps, around.offset, around.factor),
        FORMAT=kind,
        PARTS=PARTS[kind],
        BLOCKS=matrix.blocks,
        RESCALE=RESCALE[kind],
        NORM=around.norm,
        HAS_GAIN=around.gain is not None,
        HAS_SHIFT=around.shift is not None,
        HAS_BIAS=matrix.bias is not None,
        HAS_RESIDUAL=around.residual is not None,
        ACTIVATION=around.activation,
        GATED=around.gated,
        **launch.options(),
    )
    return out


def build_of(name: str, rows: int, around: str = "", *, narrow: bool = False) -> Build:
    """The form for a format and some rows; `around` is text that names what stands around the matrix."""
    kind, blocks = kind_of(name) or (0, 1)
    gated, norm = "gate" in around, 2 if "layer" in around else int("norm" in around)
    vectors = ("x", "bias", "gain", "shift", "residual", "out")
    types = dict.fromkeys(vectors, "*bf16") | {"third": "*fp16", "multiplier": "*fp32"}
    types |= {"codes": "*bf16" if kind == 0 else "*u8", "second": "*u8" if kind >= 5 else "*fp16"}
    types |= dict.fromkeys(("rows", "inputs", "outputs", "runs", "stride"), "i32")
    types |= dict.fromkeys(("eps", "offset", "factor"), "fp32")
    constants = {
        "FORMAT": kind,
        "PARTS": PARTS[kind],
        "BLOCKS": blocks,
        "RESCALE": RESCALE[kind],
        "NORM": norm,
        "HAS_GAIN": norm > 0,
        "HAS_SHIFT": norm == 2,
        "HAS_BIAS": "bias" in around,
        "HAS_RESIDUAL": "residual" in around,
        "ACTIVATION": 3 if gated else 0 if "gelu" in around else -1,
        "GATED": gated,
    }
    form = _form(kind, 2, rows, Around(norm=norm, gated=gated), 4096 if narrow else 1 << 14)
    return Build(
        f"linear, {name}, {rows} row{'s' if rows > 1 else ''}{around and ', '}{around}",
        _few_rows,
        types | constants,
        form[1],
        frozenset({"inputs", "outputs", "runs", "stride"}),
        wide_loads=2,
        bucket=form[0],
    )


BUILDS = (
    *(build_of(name, rows) for name in FORMATS if name != "int4-sym" for rows in (1, 4)),
    build_of("plain", 1, "norm"),
    build_of("plain", 1, "residual"),
    build_of("plain", 4, "layer norm, bias and gelu"),
    *(build_of(name, 1, "norm and gate") for name in ("plain", "int8", "int4", "fp6")),
    build_of("plain", 4, "norm and gate"),
    build_of("int4", 4, "norm and gate"),
)
