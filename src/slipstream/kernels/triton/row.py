"""Parts of the one-row kernel: loading the row into registers, and multiplying a tile of words by it.

Shapes: I inputs, O outputs of a tile, W words of a row (`words.PER_WORD` inputs each). A thread takes a run
    of four words (16 bytes), for fp6 a group of two runs and one run of upper bits; these hold 16 inputs of
    each of PARTS parts. For dense matrices it takes one number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.triton.overlap import wait_for_predecessor
from slipstream.kernels.triton.words import dots, field_at, nothing, pairs, taken

__all__ = ["groups_at", "row_sums", "row_taken", "sums_of_runs", "words_of"]


@triton.jit
def _four_of(wide, KIND: tl.constexpr):
    """Unpack four bfloat16 or float16 numbers from each 64 bits: a tuple of `(W,)` float32."""
    four = nothing()
    for half in tl.static_range(2):
        word = (wide >> (32 * half)).to(tl.int32)
        if tl.bfloat16 == KIND:
            four = four + ((word << 16).to(tl.float32, bitcast=True),)  # noqa: RUF005
            four = four + ((word & -65536).to(tl.float32, bitcast=True),)  # noqa: RUF005
        else:
            four = four + (word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)  # noqa: RUF005
            upper = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            four = four + (upper.to(tl.float32),)  # noqa: RUF005
    return four


@triton.jit
def _loaded(vector, at, inputs, WHOLE: tl.constexpr):
    """Load numbers, zeros beyond the end; unless WHOLE, masks cost as much as all else done per number."""
    return tl.load(vector + at) if WHOLE else tl.load(vector + at, mask=at < inputs, other=0)


@triton.jit
def _row(
    vector, inputs, KIND: tl.constexpr, COUNT: tl.constexpr, PER: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Load a row by runs of PER inputs: a tuple of their first, second, ... inputs, `(COUNT,)` float32 each.

    A vector of 16-bit numbers may be given as int64, four numbers each: loading them one by one delays the
    loads of weights by microseconds.
    """
    fields = nothing()
    run = tl.arange(0, COUNT)
    if vector.dtype.element_ty == tl.int64:
        for index in tl.static_range(PER // 4):
            four = run * (PER // 4) + index
            fields = fields + _four_of(_loaded(vector, four, inputs // 4, WHOLE), KIND)  # noqa: RUF005
    else:
        for index in tl.static_range(PER):
            numbers = _loaded(vector, run * PER + index, inputs, WHOLE).to(tl.float32)
            fields = fields + (numbers,)  # noqa: RUF005
    return fields


@triton.jit
def _centred(
    fields, gains, shifts, inputs, eps, offset,
    LAYER: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr, COUNT: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    """Apply a norm with a mean or a bias to a row, zero beyond its end; the first three are tuples."""
    first = tl.arange(0, COUNT) * PER
    mean = 0.0
    if LAYER:
        total = tl.zeros([COUNT], tl.float32)
        for index in tl.static_range(PER):
            total += fields[index]
        mean = tl.sum(total) / inputs
    squares = tl.zeros([COUNT], tl.float32)
    for index in tl.static_range(PER):
        difference = tl.where(first + index < inputs, fields[index] - mean, 0.0)
        squares += difference * difference
    root = tl.rsqrt(tl.sum(squares) / inputs + eps)
    normed = nothing()
    for index in tl.static_range(PER):
        numbers = (fields[index] - mean) * root
        if HAS_GAIN:
            numbers = numbers * (gains[index] + offset)
        if HAS_SHIFT:
            numbers += shifts[index]
        normed = normed + (tl.where(first + index < inputs, numbers, 0.0),)  # noqa: RUF005
    return normed


@triton.jit
def _both(total, most, other_total, other_most):
    return total + other_total, tl.maximum(most, other_most)


@triton.jit
def _measured(
    fields, gains, offset,
    SQUARES: tl.constexpr, HAS_GAIN: tl.constexpr, OFFSET: tl.constexpr, LARGEST: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return fields times gains, the sum of squares before that, and the largest magnitude after it.

    The latter is infinite where the sum is NaN, so that zero times it is NaN, too. Both are reduced at once:
    every synchronisation of threads delays a program's weights by a tenth of a microsecond.
    """
    squares = tl.zeros(fields[0].shape, tl.float32)
    largest = tl.zeros(fields[0].shape, tl.float32)
    scaled = nothing()
    for index in tl.static_range(COUNT):
        numbers = fields[index]
        if SQUARES or LARGEST:
            squares += numbers * numbers
        if SQUARES and HAS_GAIN:
            numbers = numbers * (gains[index] + offset if OFFSET else gains[index])
        if LARGEST:
            largest = tl.maximum(largest, tl.abs(numbers))
        scaled = scaled + (numbers,)  # noqa: RUF005
    total, most = 0.0, 0.0
    if LARGEST:
        total, most = tl.reduce((squares, largest), 0, _both)
        most = tl.where(total == total, most, float("inf"))
    elif SQUARES:
        total = tl.sum(squares)
    return scaled, total, most


@triton.jit
def _words_at(codes, at, there, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load words `(OUTPUTS, W)`; byte by byte where the plane's rows are not aligned."""
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
    """Load words `(OUTPUTS, W)` of some rows, and for fp6 those of the upper bits, `(OUTPUTS, W / 2)`."""
    inside = real[:, None] & (word < words)[None, :]
    if FORMAT >= 5:
        # Each word of the upper bits is loaded by a single thread, and a warp loads whole cache lines.
        half = tl.arange(0, word.shape[0] // 2)
        upper = real[:, None] & (half < words // 2)[None, :]
        first = _words_at(codes, row * stride + word[None, :], inside, FORMAT, True)
        high = _words_at(second, row * (stride // 2) + half[None, :], upper, FORMAT, True)
    elif ALIGNED:
        first = _words_at(codes, row * stride + word[None, :], inside, FORMAT, True)
        high = first
    else:
        # Bytes beyond the last input belong to the next row.
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
    """Return products in float32, summed over what a thread takes; for dense matrices not summed."""
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
    """Load scale and minimum of each run of 16 bytes, those of its group, `(OUTPUTS, RUNS)` float32 each."""
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
    """Load a row as COUNT runs of PER inputs, and apply a norm up to one common factor.

    Returns:
        The first, second, ... inputs of the runs, a tuple of `(COUNT,)` float32; the factor that all of them
        are still to be multiplied by; and the largest magnitude among them, where WAY needs it.
    """
    # A norm's weight is not written by the predecessor, so these loads need not wait for it.
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
    """Return the sum of the inputs of each run."""
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
    """Multiply a tile's words by the row, `(O,)` float32; `counts` is the unit of integers or pairs."""
    if WAY == 2:
        sums = pairs(first, high, fields, PARTS, FORMAT, HAND, CONVERTS) * counts
    elif WAY == 1:
        sums = dots(first.to(tl.int32, bitcast=True), fields, PARTS, HAND) * counts
    else:
        sums = _products(first, high, fields, FORMAT, PARTS, HAND)
    if FORMAT == 4:
        sums -= 8.0 * of_run[None, :]
    if FORMAT >= 3:
        sums = sums * scale
    if FORMAT == 3:
        sums += of_run[None, :] * least
    return tl.sum(sums, 1)
