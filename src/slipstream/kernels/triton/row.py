"""The pieces of the kernel of one row: the row in registers, and a tile of the words of some outputs.

Shapes: I inputs, O outputs of a tile, W words of a row (`words.PER_WORD` inputs each); four words are a run
    of 16 bytes, whose fields stand for PARTS runs of 16 inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.triton.overlap import wait_for_predecessor
from slipstream.kernels.triton.words import dots, field_at, nothing, pairs

__all__ = ["groups_at", "row_sums", "row_taken", "sums_of_runs", "words_of"]


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
def words_of(
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
def groups_at(
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
def row_taken(
    x, gain, shift, inputs, eps, offset,
    NORM: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr, FORMAT: tl.constexpr,
    PARTS: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A row, normalised: what each field of its words is multiplied by, a tuple of `(W,)` float32."""
    word = tl.arange(0, WORDS)
    base = word if FORMAT == 0 else (word // 4) * (16 * PARTS) + (word % 4) * 4
    # A norm's weight is older than the predecessor, and need not wait for it.
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
    return fields


@triton.jit
def sums_of_runs(fields, COUNT: tl.constexpr):
    """What the inputs of each run of words come to, `(W / 4,)`."""
    total = fields[0]
    for which in tl.static_range(1, COUNT):
        total += fields[which]
    return tl.sum(tl.reshape(total, (total.shape[0] // 4, 4)), 1)


@triton.jit
def row_sums(
    first, other, high, fields, counts, of_run, scale, least,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr, WAY: tl.constexpr, HAND: tl.constexpr,
):  # fmt: skip
    """A tile's words times the row, `(O,)` float32; `counts` is the unit of a row as codes or pairs."""
    if WAY == 2:
        found = pairs(first, other, high, fields, PARTS, FORMAT, HAND) * counts
    elif WAY == 1:
        found = dots(first.to(tl.int32, bitcast=True), fields, PARTS, HAND) * counts
    else:
        found = _products(first, other, high, fields, FORMAT, PARTS, FIELDS, HAND)
    if FORMAT == 4:
        found -= 8.0 * of_run[None, :]
    if FORMAT == 3 or FORMAT == 4:
        found = found * scale
    if FORMAT == 3:
        found += of_run[None, :] * least
    return tl.sum(found, 1)
