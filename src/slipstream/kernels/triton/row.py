"""The pieces of the kernel of one row: the row in registers, and a tile of the words of some outputs.

Shapes: I inputs, O outputs of a tile, W words of a row (`words.PER_WORD` inputs each). A thread takes a run
    of four words, 16 bytes, of fp6 a group of two runs beside one of upper bits; they stand for the 16 inputs
    of each of PARTS parts. Of dense matrices it takes one number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.triton.overlap import wait_for_predecessor
from slipstream.kernels.triton.words import dots, field_at, nothing, pairs, taken

__all__ = ["groups_at", "row_sums", "row_taken", "sums_of_runs", "words_of"]


@triton.jit
def _four_of(wide, KIND: tl.constexpr):
    """Four neighbours out of 64 bits each, of bfloat16 or float16: a tuple of `(W,)` float32."""
    found = nothing()
    for half in tl.static_range(2):
        word = (wide >> (32 * half)).to(tl.int32)
        if tl.bfloat16 == KIND:
            found = found + ((word << 16).to(tl.float32, bitcast=True),)  # noqa: RUF005
            found = found + ((word & -65536).to(tl.float32, bitcast=True),)  # noqa: RUF005
        else:
            found = found + (word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)  # noqa: RUF005
            upper = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            found = found + (upper.to(tl.float32),)  # noqa: RUF005
    return found


@triton.jit
def _loaded(vector, at, inputs, WHOLE: tl.constexpr):
    """Numbers of a vector, zeros beyond its end; masks cost as much as all that is done with a number."""
    return tl.load(vector + at) if WHOLE else tl.load(vector + at, mask=at < inputs, other=0)


@triton.jit
def _row(
    vector, inputs, KIND: tl.constexpr, COUNT: tl.constexpr, PER: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """A row by runs of PER inputs: a tuple of their first, second, ... inputs, `(COUNT,)` float32 each.

    A vector of 16-bit numbers may come four to an int64: loaded one by one, they keep a program from its
    weights for microseconds.
    """
    fields = nothing()
    run = tl.arange(0, COUNT)
    if vector.dtype.element_ty == tl.int64:
        for index in tl.static_range(PER // 4):
            four = run * (PER // 4) + index
            fields = fields + _four_of(_loaded(vector, four, inputs // 4, WHOLE), KIND)  # noqa: RUF005
    else:
        for index in tl.static_range(PER):
            one = _loaded(vector, run * PER + index, inputs, WHOLE).to(tl.float32)
            fields = fields + (one,)  # noqa: RUF005
    return fields


@triton.jit
def _centred(
    fields, gains, shifts, inputs, eps, offset,
    LAYER: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr, COUNT: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    """A row as a norm with a mean or a bias hands it on, zero beyond its end; the first three are tuples."""
    first = tl.arange(0, COUNT) * PER
    mean = 0.0
    if LAYER:
        total = tl.zeros([COUNT], tl.float32)
        for index in tl.static_range(PER):
            total += fields[index]
        mean = tl.sum(total) / inputs
    squares = tl.zeros([COUNT], tl.float32)
    for index in tl.static_range(PER):
        off = tl.where(first + index < inputs, fields[index] - mean, 0.0)
        squares += off * off
    root = tl.rsqrt(tl.sum(squares) / inputs + eps)
    found = nothing()
    for index in tl.static_range(PER):
        one = (fields[index] - mean) * root
        if HAS_GAIN:
            one = one * (gains[index] + offset)
        if HAS_SHIFT:
            one += shifts[index]
        found = found + (tl.where(first + index < inputs, one, 0.0),)  # noqa: RUF005
    return found


@triton.jit
def _both(total, most, other_total, other_most):
    return total + other_total, tl.maximum(most, other_most)


@triton.jit
def _measured(
    fields, gains, offset,
    SQUARES: tl.constexpr, HAS_GAIN: tl.constexpr, OFFSET: tl.constexpr, LARGEST: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Fields times the gains, the sum of their squares before, and the largest magnitude after.

    That is infinite where the sum is none, so that zero times it is none, too. Threads meet once for both:
    every such meeting keeps a program from its weights for a tenth of a microsecond.
    """
    squares = tl.zeros(fields[0].shape, tl.float32)
    largest = tl.zeros(fields[0].shape, tl.float32)
    found = nothing()
    for index in tl.static_range(COUNT):
        one = fields[index]
        if SQUARES or LARGEST:
            squares += one * one
        if SQUARES and HAS_GAIN:
            one = one * (gains[index] + offset if OFFSET else gains[index])
        if LARGEST:
            largest = tl.maximum(largest, tl.abs(one))
        found = found + (one,)  # noqa: RUF005
    total, most = 0.0, 0.0
    if LARGEST:
        total, most = tl.reduce((squares, largest), 0, _both)
        most = tl.where(total == total, most, float("inf"))
    elif SQUARES:
        total = tl.sum(squares)
    return found, total, most


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
def words_of(
    codes, second, row, real, word, words, stride, inputs, FORMAT: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Words `(OUTPUTS, W)` of some rows, and of fp6 those of the upper bits, `(OUTPUTS, W / 2)`."""
    inside = real[:, None] & (word < words)[None, :]
    if FORMAT >= 5:
        # Every word of the upper bits is asked for by one thread alone, and a warp asks for whole lines.
        half = tl.arange(0, word.shape[0] // 2)
        upper = real[:, None] & (half < words // 2)[None, :]
        first = _words_at(codes, row * stride + word[None, :], inside, FORMAT, True)
        high = _words_at(second, row * (stride // 2) + half[None, :], upper, FORMAT, True)
    elif ALIGNED:
        first = _words_at(codes, row * stride + word[None, :], inside, FORMAT, True)
        high = first
    else:
        # What lies beyond the last input belongs to the next row.
        there = nothing()
        for byte in tl.static_range(4):
            there = there + (real[:, None] & (4 * word + byte < inputs)[None, :],)  # noqa: RUF005
        first = _words_at(codes, row * stride + (4 * word)[None, :], there, FORMAT, False)
        high = first
    return first, high


@triton.jit
def _products(
    first, high, fields, FORMAT: tl.constexpr, PARTS: tl.constexpr, HAND: tl.constexpr
):  # fmt: skip
    """Products in float32, summed over what a thread takes; of dense matrices each word alone."""
    if FORMAT == 0:
        sums = first.to(tl.float32) * fields[0][None, :]
    else:
        firsts, highs = taken(first, high, FORMAT)
        sums = tl.zeros(firsts[0].shape, tl.float32)
        for part in tl.static_range(PARTS):
            for at in tl.static_range(16):
                word = firsts[part // 2 * 4 + at // 4]
                weight = field_at(word, highs[at // 4], part, at % 4, FORMAT, HAND)
                sums += weight * fields[part * 16 + at][None, :]
    return sums


@triton.jit
def groups_at(
    second, third, row, real, words, RUNS: tl.constexpr, BLOCKS: tl.constexpr, MINIMUM: tl.constexpr
):  # fmt: skip
    """Scale and minimum of the groups of runs of 16 bytes, `(OUTPUTS, RUNS)` float32 each."""
    run = tl.arange(0, RUNS)
    group = row * (words // 4 // BLOCKS) + (run // BLOCKS)[None, :]
    there = real[:, None] & (run < words // 4)[None, :]
    scale = tl.load(second + group, mask=there, other=0.0).to(tl.float32)
    least = scale
    if MINIMUM:
        least = tl.load(third + group, mask=there, other=0.0).to(tl.float32)
    return scale, least


@triton.jit
def row_taken(
    x, gain, shift, inputs, eps, offset,
    NORM: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr, OFFSET: tl.constexpr,
    KIND: tl.constexpr, WAY: tl.constexpr, COUNT: tl.constexpr, PER: tl.constexpr,
    WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A row as a norm hands it on, but for one factor, by COUNT runs of PER inputs.

    Returns:
        The first, second, ... inputs of the runs, a tuple of `(COUNT,)` float32; what all of them are still
        to be multiplied by; and the largest magnitude among them, where WAY makes use of it.
    """
    # A norm's weight is older than the predecessor, and need not wait for it.
    gains = nothing()
    shifts = nothing()
    if HAS_GAIN:
        gains = _row(gain, inputs, KIND, COUNT, PER, WHOLE)
    if HAS_SHIFT:
        shifts = _row(shift, inputs, KIND, COUNT, PER, WHOLE)
    wait_for_predecessor(OVERLAPS)
    fields = _row(x, inputs, KIND, COUNT, PER, WHOLE)
    centred: tl.constexpr = NORM == 2 or HAS_SHIFT
    if centred:
        fields = _centred(
            fields, gains, shifts, inputs, eps, offset, NORM == 2, HAS_GAIN, HAS_SHIFT, COUNT, PER
        )
    fields, squares, most = _measured(
        fields, gains, offset, NORM == 1 and not centred, HAS_GAIN, OFFSET, WAY > 0, PER
    )
    root = 1.0
    if NORM == 1 and not centred:
        root = tl.rsqrt(squares / inputs + eps)
    return fields, root, most


@triton.jit
def sums_of_runs(fields, PER: tl.constexpr):
    """What the inputs of each run come to."""
    total = fields[0]
    for which in tl.static_range(1, PER):
        total += fields[which]
    return total


@triton.jit
def row_sums(
    first, high, fields, counts, of_run, scale, least,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, WAY: tl.constexpr, HAND: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """A tile's words times the row, `(O,)` float32; `counts` is the unit of a row as codes or pairs."""
    if WAY == 2:
        found = pairs(first, high, fields, PARTS, FORMAT, HAND, CONVERTS) * counts
    elif WAY == 1:
        found = dots(first.to(tl.int32, bitcast=True), fields, PARTS, HAND) * counts
    else:
        found = _products(first, high, fields, FORMAT, PARTS, HAND)
    if FORMAT == 4:
        found -= 8.0 * of_run[None, :]
    if FORMAT >= 3:
        found = found * scale
    if FORMAT == 3:
        found += of_run[None, :] * least
    return tl.sum(found, 1)
