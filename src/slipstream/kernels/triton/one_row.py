"""One row times a matrix in any weight format, with the norm before it and what follows it in a layer.

A few programs loop over all outputs. Each first loads the whole row into registers and normalises it, so that
the norm needs no launch of its own and is computed once; from then on only weights are read, a tile of
outputs at a time, several tiles ahead, through shared memory. Products are summed in float32. The matrix is
followed by bias, activation (of gate and up, whose rows are paired within a tile), and residual.

Where the device supports it, a launch begins while its predecessor ends (`overlap`). A following product is
not let in any earlier: its programs would be placed wherever there is room first, and on a multiprocessor
that gets many they would end last, as each has a fixed share of the tiles. Attention is let in, as it is
small.

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
from slipstream.kernels.triton.overlap import let_in, overlapping, overlaps
from slipstream.kernels.triton.row import groups_at, row_sums, row_taken, sums_of_runs, words_of
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
    INTEGERS,
    PAIRED,
    PER_WORD,
    fixed,
    paired,
    rescale_of,
)
from slipstream.ops.activation import KINDS

__all__ = ["BUILDS", "WIDEST_ROW", "build_of", "times_row"]

WIDEST_ROW = 1 << 15
"""Maximum number of inputs of a row that the registers of a program can hold."""

_NARROW = 8192


@triton.jit
def _store(
    y, before, out, place, there, factor,
    HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Apply activation and residual to sums `(OUTPUTS,)` and store them; `y` has gate and up interleaved."""
    if GATED:
        first, second = tl.split(tl.reshape(y, (y.shape[0] // 2, 2)))
        y = gate(first, second, ACTIVATION)
    elif ACTIVATION >= 0:
        y = apply(y, ACTIVATION)
    if HAS_RESIDUAL:
        y = before + factor * y
    tl.store(out + place, y.to(out.dtype.element_ty), mask=there)


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def _one_row(
    x, codes, second, third, multiplier, bias, gain, shift, residual, out,
    inputs, outputs, words, stride, eps, offset, factor,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
    RESCALE: tl.constexpr, NORM: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ALIGNED: tl.constexpr, WAY: tl.constexpr, HAND: tl.constexpr, CONVERTS: tl.constexpr,
    OFFSET: tl.constexpr, OVERLAPS: tl.constexpr, LETS: tl.constexpr, WHOLE: tl.constexpr,
    WORDS: tl.constexpr, OUTPUTS: tl.constexpr, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    let_in(LETS)
    TAKEN: tl.constexpr = WORDS if FORMAT == 0 else WORDS // 8 if FORMAT >= 5 else WORDS // 4
    fields, root, most = row_taken(
        x, gain, shift, inputs, eps, offset, NORM, HAS_GAIN, HAS_SHIFT, OFFSET, out.dtype.element_ty,
        WAY, TAKEN, 16 * PARTS if FORMAT > 0 else 1, WHOLE, OVERLAPS,
    )  # fmt: skip
    of_run, counts = 0.0, 1.0
    if FORMAT == 3 or FORMAT == 4:
        of_run = sums_of_runs(fields, 16 * PARTS)
    if WAY == 1:
        fields, counts = fixed(fields, most, PARTS, HAND)
    if WAY == 2:
        fields, counts = paired(fields, most, PARTS, FORMAT, HAND, CONVERTS)
    word = tl.arange(0, WORDS)
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
        # Small loads are issued first: after the sums nothing would hide their latency.
        times, added, before, scale, least = 1.0, 0.0, 0.0, 1.0, 0.0
        if FORMAT >= 5:
            # Before the words: the compiler then moves scales to the threads that hold the sums, not sums to
            # those that loaded scales. For int4, with more sums per thread, that takes more operations.
            scale, least = groups_at(third, third, row, real, words // BLOCKS, TAKEN, 1, False)
        first, high = words_of(codes, second, row, real, word, words, stride, inputs, FORMAT, ALIGNED)
        if FORMAT == 3 or FORMAT == 4:
            scale, least = groups_at(second, third, row, real, words, TAKEN, BLOCKS, FORMAT == 3)
        if FORMAT > 0:
            times = tl.load(multiplier + output, mask=real, other=0.0) * RESCALE
        if HAS_BIAS:
            added = tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            before = tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
        y = row_sums(first, high, fields, counts, of_run, scale, least, FORMAT, PARTS, WAY, HAND, CONVERTS)
        if FORMAT > 0 or NORM == 1:
            y = y * (times * root)
        if HAS_BIAS:
            y += added
        _store(y, before, out, place, there, factor, HAS_RESIDUAL, ACTIVATION, GATED)


def _form(kind: int, itemsize: int, inputs: int, around: Around, *, narrow: bool) -> tuple[Bucket, Launch]:
    """Choose sizes so that enough bytes are in flight and the row fits into registers."""
    padded = max(int(triton.next_power_of_2(inputs)), 512)
    each = itemsize if kind == 0 else 1
    # A thread holds 32 numbers of the row, or 64 of a long one.
    warps = min(max(padded // (32 * 32), 2), 16)
    outputs = max(2, min(8, (1 << 14) // (padded * each)))
    programs = max(1, 16 // warps)
    if interpreted():  # a program then costs more than what it computes
        outputs, programs = 16, 1
    sizes = {"OUTPUTS": outputs, "PROGRAMS": programs, "AHEAD": 3}
    shape = f"{name_of(kind)}{', float32' if kind == 0 and itemsize > 2 else ''}, up to {padded} inputs"
    shape += ("", ", norm", ", layer norm")[around.norm] + (", gate" if around.gated else "")
    # A narrow matrix has few tiles, which should be small.
    shape += f", up to {_NARROW} outputs" if narrow else ""
    choices = {"OUTPUTS": (2, 4, 8) if around.gated else (1, 2, 4, 8), "PROGRAMS": (1, 2, 3, 4, 6, 8)}
    choices["AHEAD"] = (2, 3, 4, 6)
    return Bucket("one row", shape, choices, warps=(2, 4, 8, 16)), Launch(sizes, warps=warps)


def _way(kind: int, itemsize: int, *, hand: bool) -> int:
    """Return how a row is multiplied: 0 in float32, 1 as integers, 2 as pairs of float16."""
    if itemsize > 2:
        return 0
    return 1 if kind in INTEGERS else 2 if kind in PAIRED and hand else 0


def _constants(
    kind: int, itemsize: int, blocks: int, inputs: int, around: Around, number: int
) -> dict[str, Any]:
    """Return the kernel's compile-time constants, except those that depend on the tensors at hand."""
    hand = by_hand(number, least=89 if kind == 2 else 80)
    way = _way(kind, itemsize, hand=hand or interpreted())
    words = max(int(triton.next_power_of_2(-(-inputs // PER_WORD[kind]))), 128)
    # For products in float32 only fp8 codes are converted by the hardware.
    converts = by_hand(number, least=89) and kind in PAIRED and (kind == 2 or way == 2)
    return {
        "FORMAT": kind,
        "PARTS": PARTS[kind],
        "BLOCKS": blocks,
        "RESCALE": rescale_of(kind, RESCALE[kind], hand=converts),
        "NORM": around.norm,
        "HAS_GAIN": around.gain is not None,
        "HAS_SHIFT": around.shift is not None,
        "HAS_RESIDUAL": around.residual is not None,
        "ACTIVATION": around.activation,
        "GATED": around.gated,
        "HAND": hand,
        "WAY": way,
        "CONVERTS": converts,
        "OVERLAPS": overlaps(number),
        "LETS": overlaps(number) and around.lets,
        "OFFSET": around.offset != 0,
        "WHOLE": words * PER_WORD[kind] == inputs,
        "WORDS": words,
    }


def _by_fours(vector: Tensor | None, x: Tensor, kind: int) -> Tensor | None:
    """Return a vector in the row's 16-bit dtype viewed as int64, four numbers each, where possible."""
    if vector is None or kind == 0 or vector.dtype != x.dtype or vector.element_size() != 2:
        return vector
    fits = vector.numel() % 4 == 0 and vector.storage_offset() % 4 == 0 and vector.is_contiguous()
    return vector.view(torch.int64) if fits else vector


def times_row(x: Tensor, matrix: Matrix, around: Around) -> Tensor:
    """Multiply one row by a matrix, including the norm before it and what follows it.

    Args:
        x: `(1, I)`, contiguous, of at most `WIDEST_ROW` inputs.
        matrix: `(O, I)`.
        around: The norm before the matrix; activation and residual after it.

    Returns:
        `(1, O)`, or `(1, O / 2)` where gated, in the dtype of x.
    """
    inputs, kind, outputs = x.shape[1], matrix.kind, matrix.outputs
    out = x.new_empty(1, outputs // 2 if around.gated else outputs)
    number = generation(x.device)
    launch = launched(*_form(kind, x.element_size(), inputs, around, narrow=outputs <= _NARROW), number)
    codes, second, third, multiplier = planes_of(matrix.planes, kind)
    # Rows of codes smaller than a byte are padded to whole runs, rows of one byte per code are not.
    whole = inputs % 4 == 0 and codes.stride(0) % 4 == 0 and codes.data_ptr() % 16 == 0
    aligned = kind not in (1, 2) or whole
    stride = codes.stride(0)
    if kind and aligned:
        codes, stride = codes.view(torch.int32), stride // 4
        second = second.view(torch.int32) if kind >= 5 else second
    words = -(-inputs // PER_WORD[kind]) if kind <= 2 else stride
    tiles = triton.cdiv(outputs, launch.sizes["OUTPUTS"])
    programs = launch.sizes["PROGRAMS"] * processors(x.device)
    fours = [_by_fours(vector, x, kind) for vector in (x, around.gain, around.shift)]
    optional = (matrix.bias, *fours[1:], around.residual)
    _one_row[(min(tiles, programs),)](
        *(fours[0], codes, second, third, multiplier),
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
    """Return the build for a weight format and a row length on a GPU generation (0 for the AMD canary).

    Args:
        name: Name of the weight format.
        inputs: I.
        around: Text that names what surrounds the matrix.
        narrow: Whether the matrix has few outputs.
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
    if kind:
        types |= dict.fromkeys(("x", "gain", "shift"), "*i64")
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
