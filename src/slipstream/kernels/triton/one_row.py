"""One row times a matrix in any weight format, with what stands before and after it in a layer.

Few programs walk over all outputs. Each takes the whole row into registers first, normalised, so that a
norm costs no launch of its own and is taken once; from then on nothing but weights is read, some outputs at a
time, several tiles ahead, through shared memory. Products are summed in float32. After the matrix come bias,
activation (of gate and up, whose rows a tile takes in pairs), and the residual.

Where the device can, a launch begins while its predecessor ends (`overlap`). The next one is not let in
any earlier: its programs would go where there is room first, and those of a processor that is given many
would end last, for each has its share of the tiles from the start.

Source: a loop over tiles with the vector held by the program as in persistent GEMV kernels; NVIDIA CUDA
Programming Guide, "Programmatic Dependent Launch", for the overlap of launches.

Shapes: I inputs, O outputs, W words of a row (`words.PER_WORD` inputs each).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.activation import apply, gate
from slipstream.kernels.triton.decode import FORMATS, PARTS, RESCALE, kind_of, name_of
from slipstream.kernels.triton.operands import Around, Matrix, planes_of
from slipstream.kernels.triton.overlap import overlapping, overlaps, wait_for_predecessor
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import (
    Bucket,
    Build,
    Launch,
    by_hand,
    generation,
    interpreted,
    processors,
)
from slipstream.kernels.triton.words import (
    FIELDS,
    INTEGERS,
    PER_WORD,
    dots,
    field_at,
    fixed,
    nothing,
    rescale_of,
)
from slipstream.ops.activation import KINDS

__all__ = ["BUILDS", "WIDEST_ROW", "build_of", "times_row"]

WIDEST_ROW = 1 << 15
"""Inputs of a row that the registers of a program can hold."""

_NARROW = 8192


@triton.jit
def _row(x, base, inputs, PARTS: tl.constexpr, FIELDS: tl.constexpr):
    """What each field of the words of a row is multiplied by: a tuple of `(W,)` float32."""
    fields = nothing()
    for part in tl.static_range(PARTS):
        for field in tl.static_range(FIELDS):
            at = base + (16 * part + field)
            fields = fields + (tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32),)  # noqa: RUF005
    return fields


@triton.jit
def _normed(
    fields, gains, shifts, base, inputs, eps, offset,
    LAYER: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr, PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """A row as a norm hands it on, zero beyond its end; all four are tuples as `_row` makes them."""
    mean = 0.0
    if LAYER:
        total = tl.zeros(base.shape, tl.float32)
        for index in tl.static_range(PARTS * FIELDS):
            total += fields[index]
        mean = tl.sum(total) / inputs
    squares = tl.zeros(base.shape, tl.float32)
    for index in tl.static_range(PARTS * FIELDS):
        off = fields[index] - mean
        if LAYER:
            at = base + (16 * (index // FIELDS) + index % FIELDS)
            off = tl.where(at < inputs, off, 0.0)
        squares += off * off
    root = tl.rsqrt(tl.sum(squares) / inputs + eps)
    found = nothing()
    for index in tl.static_range(PARTS * FIELDS):
        one = (fields[index] - mean) * root
        if HAS_GAIN:
            one = one * (gains[index] + offset)
        if HAS_SHIFT:
            one += shifts[index]
        if LAYER:
            at = base + (16 * (index // FIELDS) + index % FIELDS)
            one = tl.where(at < inputs, one, 0.0)
        found = found + (one,)  # noqa: RUF005
    return found


@triton.jit
def _words_at(codes, at, there, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Words `(OUTPUTS, W)`; of a plane whose rows begin anywhere, byte by byte."""
    if FORMAT == 0:
        word = tl.load(codes + at, mask=there, other=0.0)
    elif ALIGNED:
        word = tl.load(codes + at, mask=there, other=0).to(tl.uint32, bitcast=True)
    else:
        word = tl.load(codes + at, mask=there[0], other=0).to(tl.uint32)
        for byte in tl.static_range(1, 4):
            word |= tl.load(codes + at + byte, mask=there[byte], other=0).to(tl.uint32) << (8 * byte)
    return word


@triton.jit
def _tile(
    codes, second, row, real, word, words, stride, inputs, FORMAT: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Three blocks of words `(OUTPUTS, W)` of some rows: see `words.field_at`."""
    inside = real[:, None] & (word < words)[None, :]
    if FORMAT >= 5:
        nibbles = row * (2 * stride) + ((word // 4) * 8 + word % 4)[None, :]
        first = _words_at(codes, nibbles, inside, FORMAT, True)
        other = _words_at(codes, nibbles + 4, inside, FORMAT, True)
        high = _words_at(second, row * stride + word[None, :], inside, FORMAT, True)
    elif ALIGNED:
        first = _words_at(codes, row * stride + word[None, :], inside, FORMAT, True)
        other = first
        high = first
    else:
        # What lies beyond the last input belongs to the next row.
        there = nothing()
        for byte in tl.static_range(4):
            there = there + (real[:, None] & (4 * word + byte < inputs)[None, :],)  # noqa: RUF005
        first = _words_at(codes, row * stride + (4 * word)[None, :], there, FORMAT, False)
        other = first
        high = first
    return first, other, high


@triton.jit
def _products(
    first, other, high, fields,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr, HAND: tl.constexpr,
):  # fmt: skip
    """Products in float32, of each word `(OUTPUTS, W)`, of int4's of each run `(OUTPUTS, W / 4)`."""
    sums = tl.zeros(first.shape, tl.float32)
    for part in tl.static_range(PARTS):
        for field in tl.static_range(FIELDS):
            weight = field_at(first, other, high, part, field, FORMAT, HAND)
            sums += weight * fields[part * FIELDS + field][None, :]
    if FORMAT == 3 or FORMAT == 4:
        sums = tl.sum(tl.reshape(sums, (first.shape[0], first.shape[1] // 4, 4)), 2)
    return sums


@triton.jit
def _groups(
    second, third, row, real, words, RUNS: tl.constexpr, BLOCKS: tl.constexpr, MINIMUM: tl.constexpr
):  # fmt: skip
    """Scale and minimum of int4's groups by runs of 16 bytes, `(OUTPUTS, RUNS)` float32 each."""
    run = tl.arange(0, RUNS)
    group = row * (words // 4 // BLOCKS) + (run // BLOCKS)[None, :]
    there = real[:, None] & (run < words // 4)[None, :]
    scale = tl.load(second + group, mask=there, other=0.0).to(tl.float32)
    least = scale
    if MINIMUM:
        least = tl.load(third + group, mask=there, other=0.0).to(tl.float32)
    return scale, least


@triton.jit
def _store(
    y, before, out, place, there, factor,
    HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Finish `(OUTPUTS,)` and store them; gate and up lie side by side in it."""
    if GATED:
        first, second = tl.split(tl.reshape(y, (y.shape[0] // 2, 2)))
        y = gate(first, second, ACTIVATION)
    elif ACTIVATION >= 0:
        y = apply(y, ACTIVATION)
    if HAS_RESIDUAL:
        y = before + factor * y
    tl.store(out + place, y.to(out.dtype.element_ty), mask=there)


# The arguments of a launch are what the host hands over, in registers that the driver fills; one each.
@triton.jit
def _one_row(
    x, codes, second, third, multiplier, bias, gain, shift, residual, out,
    inputs, outputs, words, stride, eps, offset, factor,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr, BLOCKS: tl.constexpr,
    RESCALE: tl.constexpr, NORM: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ALIGNED: tl.constexpr, INTEGER: tl.constexpr, HAND: tl.constexpr, OVERLAPS: tl.constexpr,
    WORDS: tl.constexpr, OUTPUTS: tl.constexpr, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    word = tl.arange(0, WORDS)
    # Four words are a run of 16 bytes, whose fields stand for PARTS runs of 16 inputs.
    base = word if FORMAT == 0 else (word // 4) * (16 * PARTS) + (word % 4) * 4
    # All kernels before the predecessor have ended: what it did not write may be read at once.
    gains = nothing()
    shifts = nothing()
    if HAS_GAIN:
        gains = _row(gain, base, inputs, PARTS, FIELDS)
    if HAS_SHIFT:
        shifts = _row(shift, base, inputs, PARTS, FIELDS)
    wait_for_predecessor(OVERLAPS)
    fields = _row(x, base, inputs, PARTS, FIELDS)
    if NORM > 0:
        fields = _normed(
            fields, gains, shifts, base, inputs, eps, offset, NORM == 2, HAS_GAIN, HAS_SHIFT, PARTS, FIELDS
        )
    if FORMAT == 3 or FORMAT == 4:
        total = tl.zeros([WORDS], tl.float32)
        for which in tl.static_range(PARTS * FIELDS):
            total += fields[which]
        of_run = tl.sum(tl.reshape(total, (WORDS // 4, 4)), 1)
    counts = 1.0
    if INTEGER:
        fields, counts = fixed(fields, PARTS)
    stored: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    for tile in tl.range(tl.program_id(0), tl.cdiv(outputs, OUTPUTS), tl.num_programs(0), num_stages=AHEAD):
        index = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        real = index < outputs
        output = index
        if GATED:
            output = index // 2 + (index % 2) * (outputs // 2)
        row = output.to(tl.int64)[:, None]
        place = tile * stored + tl.arange(0, stored)
        there = place < (outputs // 2 if GATED else outputs)
        # What is small is asked for first: behind the sums nothing would hide how long it takes.
        first, other, high = _tile(codes, second, row, real, word, words, stride, inputs, FORMAT, ALIGNED)
        times, added, before = 1.0, 0.0, 0.0
        if FORMAT == 3 or FORMAT == 4:
            scale, least = _groups(second, third, row, real, words, WORDS // 4, BLOCKS, FORMAT == 3)
        if FORMAT > 0:
            times = tl.load(multiplier + output, mask=real, other=0.0) * RESCALE
        if HAS_BIAS:
            added = tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            before = tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
        if INTEGER:
            found = dots(first.to(tl.int32, bitcast=True), fields, PARTS, HAND) * counts
        else:
            found = _products(first, other, high, fields, FORMAT, PARTS, FIELDS, HAND)
        if FORMAT == 4:
            found -= 8.0 * of_run[None, :]
        if FORMAT == 3 or FORMAT == 4:
            found = found * scale
        if FORMAT == 3:
            found += of_run[None, :] * least
        y = tl.sum(found, 1)
        if FORMAT > 0:
            y = y * times
        if HAS_BIAS:
            y += added
        _store(y, before, out, place, there, factor, HAS_RESIDUAL, ACTIVATION, GATED)


def _form(kind: int, itemsize: int, inputs: int, around: Around, *, narrow: bool) -> tuple[Bucket, Launch]:
    """Tile, programs per processor and depth: enough bytes on their way, and a row that fits registers."""
    padded = max(int(triton.next_power_of_2(inputs)), 512)
    each = itemsize if kind == 0 else 1
    # A thread holds 32 numbers of the row, or 64 of a long one.
    warps = min(max(padded // (32 * 32), 2), 16)
    outputs = max(2, min(8, (1 << 14) // (padded * each)))
    programs = max(1, 16 // warps)
    if interpreted():  # there a program costs more than what it computes
        outputs, programs = 16, 1
    sizes = {"OUTPUTS": outputs, "PROGRAMS": programs, "AHEAD": 3}
    shape = f"{name_of(kind)}{', float32' if kind == 0 and itemsize > 2 else ''}, up to {padded} inputs"
    shape += ("", ", norm", ", layer norm")[around.norm] + (", gate" if around.gated else "")
    # Of a narrow matrix tiles are few, and each had better be small.
    shape += f", up to {_NARROW} outputs" if narrow else ""
    choices = {"OUTPUTS": (2, 4, 8) if around.gated else (1, 2, 4, 8), "PROGRAMS": (1, 2, 3, 4, 6, 8)}
    choices["AHEAD"] = (2, 3, 4, 6)
    return Bucket("one row", shape, choices, warps=(2, 4, 8, 16)), Launch(sizes, warps=warps)


def _constants(
    kind: int, itemsize: int, blocks: int, inputs: int, around: Around, number: int
) -> dict[str, Any]:
    """What the kernel is compiled for, but for what depends on the tensors at hand."""
    hand = by_hand(number, least=89 if kind == 2 else 80)
    return {
        "FORMAT": kind,
        "PARTS": PARTS[kind],
        "FIELDS": FIELDS[kind],
        "BLOCKS": blocks,
        "RESCALE": rescale_of(kind, RESCALE[kind], hand=hand),
        "NORM": around.norm,
        "HAS_GAIN": around.gain is not None,
        "HAS_SHIFT": around.shift is not None,
        "HAS_RESIDUAL": around.residual is not None,
        "ACTIVATION": around.activation,
        "GATED": around.gated,
        "HAND": hand,
        "INTEGER": kind in INTEGERS and itemsize == 2,
        "OVERLAPS": overlaps(number),
        "WORDS": max(int(triton.next_power_of_2(-(-inputs // PER_WORD[kind]))), 128),
    }


def times_row(x: Tensor, matrix: Matrix, around: Around) -> Tensor:
    """Return what a matrix, and what stands around it, makes of one row.

    Args:
        x: `(1, I)`, contiguous, of at most `WIDEST_ROW` inputs.
        matrix: `(O, I)`.
        around: Norm before; activation and residual after.

    Returns:
        `(1, O)`, or `(1, O / 2)` where gated, in the dtype of x.
    """
    inputs, kind, outputs = x.shape[1], matrix.kind, matrix.outputs
    out = x.new_empty(1, outputs // 2 if around.gated else outputs)
    number = generation(x.device)
    launch = launched(*_form(kind, x.element_size(), inputs, around, narrow=outputs <= _NARROW), number)
    codes, second, third, multiplier = planes_of(matrix.planes, kind)
    aligned = kind == 0 or (inputs % 4 == 0 and codes.stride(0) % 4 == 0 and codes.data_ptr() % 16 == 0)
    stride = codes.stride(0)
    if kind and aligned:
        codes, stride = codes.view(torch.int32), stride // (8 if kind >= 5 else 4)
        second = second.view(torch.int32) if kind >= 5 else second
    words = -(-inputs // PER_WORD[kind]) if kind <= 2 else stride
    tiles = triton.cdiv(outputs, launch.sizes["OUTPUTS"])
    programs = launch.sizes["PROGRAMS"] * processors(x.device)
    optional = (matrix.bias, around.gain, around.shift, around.residual)
    _one_row[(min(tiles, programs),)](
        *(x, codes, second, third, multiplier),
        *(x if tensor is None else tensor for tensor in optional),
        out,
        *(inputs, outputs, words, stride, around.eps, around.offset, around.factor),
        **_constants(kind, x.element_size(), matrix.blocks, inputs, around, number),
        HAS_BIAS=matrix.bias is not None,
        ALIGNED=aligned,
        **launch.options(),
        **overlapping(number),
    )
    return out


def build_of(name: str, inputs: int, around: str = "", *, narrow: bool = False, number: int = 90) -> Build:
    """The form for a format and a row of some inputs, for a generation (0 for the canary on AMD).

    Args:
        name: Of the weight format.
        inputs: I.
        around: Text that names what stands around the matrix.
        narrow: It has few outputs.
        number: Compute capability (80, 90), or 0.
    """
    kind, blocks = kind_of(name) or (0, 1)
    gated, norm = "gate" in around, 2 if "layer" in around else int("norm" in around)
    given = torch.empty(0)
    what = Around(
        norm=norm,
        gain=given if norm else None,
        shift=given if norm == 2 else None,
        activation=KINDS["silu"] if gated else KINDS["gelu"] if "gelu" in around else -1,
        gated=gated,
        residual=given if "residual" in around else None,
    )
    vectors = ("x", "bias", "gain", "shift", "residual", "out")
    types: dict[str, Any] = dict.fromkeys(vectors, "*bf16") | {"third": "*fp16", "multiplier": "*fp32"}
    types |= {"codes": "*bf16" if kind == 0 else "*i32", "second": "*i32" if kind >= 5 else "*fp16"}
    types |= dict.fromkeys(("inputs", "outputs", "words", "stride"), "i32")
    types |= dict.fromkeys(("eps", "offset", "factor"), "fp32")
    bucket, launch = _form(kind, 2, inputs, what, narrow=narrow)
    return Build(
        f"one row, {name}, {inputs} inputs{around and ', '}{around}{', narrow' if narrow else ''}"
        f"{f', sm_{number}' if number else ''}",
        _one_row,
        types
        | _constants(kind, 2, blocks, inputs, what, number)
        | {"HAS_BIAS": "bias" in around, "ALIGNED": True},
        launch,
        frozenset({"inputs", "outputs", "words", "stride"}),
        wide_loads=2,
        needs=("LDGSTS",),
        targets=(f"sm_{number}",) if number else ("gfx942",),
        bucket=bucket,
    )


def _builds() -> Iterator[Build]:
    for number in (80, 90):
        for name in FORMATS:
            if name != "int4-sym":
                yield build_of(name, 4096, number=number)
                yield build_of(name, 14336, "residual", narrow=True, number=number)
        for name in ("plain", "int8", "fp8", "int4", "fp6"):
            yield build_of(name, 4096, "norm and gate", number=number)
        yield build_of("plain", 2048, "norm", number=number)
        yield build_of("plain", 768, "layer norm, bias and gelu", number=number)
    yield from (build_of(name, 4096, number=0) for name in ("plain", "int8", "fp8", "int4", "fp6"))


BUILDS = tuple(_builds())
