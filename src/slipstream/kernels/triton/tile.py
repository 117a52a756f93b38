"""Decodes a tile of packed weights for the matrix units: one block of weights per field of the bytes.

Blocks of bytes have two dimensions, so that a warp reads runs of rows and not a column of them. There are
only elementwise operations between loads and products, so that bytes go from shared memory directly to the
registers where products expect them.

Shapes: G runs of WIDTH bytes, BYTES = G * WIDTH.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.triton.decode import decoded, group_at
from slipstream.kernels.triton.fields import fields_of
from slipstream.kernels.triton.words import nothing

__all__ = ["weights_at"]


@triton.jit
def _each(group, TIMES: tl.constexpr):
    """Repeat each column of `(OUTPUTS, G)` TIMES times: `(OUTPUTS, G * TIMES)`."""
    wide = tl.broadcast_to(group[:, :, None], (group.shape[0], group.shape[1], TIMES))
    return tl.reshape(wide, (group.shape[0], group.shape[1] * TIMES))


@triton.jit
def _upper_bits(second, own, begin, limit, ODD: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr):
    """Load fp6's upper bits for the even runs, or for the odd ones: `(OUTPUTS, BYTES)`, zeros elsewhere.

    In a run of the second plane, the lower nibbles belong to one run of the first plane, the upper ones to
    the next.
    """
    lane = tl.arange(0, BYTES)
    run = lane // WIDTH
    at = begin * (WIDTH // 2) + (run // 2) * WIDTH + lane % WIDTH
    there = (run % 2 == ODD) & (at < limit // 2)
    return tl.load(second + own + at[None, :], mask=there[None, :], other=0)


@triton.jit
def _first_half(group):
    """Return the first half of the columns of `(OUTPUTS, 2 G)`."""
    halves = tl.reshape(group, (group.shape[0], 2, group.shape[1] // 2))
    first, _ = tl.split(tl.permute(halves, (0, 2, 1)))
    return first


@triton.jit
def _groups(
    second, third, matrix_row, begin, runs, BLOCKS: tl.constexpr, FORMAT: tl.constexpr, RUNS: tl.constexpr
):  # fmt: skip
    """Load scale and minimum of the groups of some runs, `(OUTPUTS, RUNS / BLOCKS)` float32 each."""
    GROUPS: tl.constexpr = RUNS // BLOCKS
    # At least four columns of 16 bits: each thread of four warps then has two of them, the least that can be
    # loaded asynchronously while the previous step is computed.
    WIDE: tl.constexpr = GROUPS if GROUPS > 4 else 4
    column = tl.arange(0, WIDE)
    # Written so that the compiler sees what the first group is a multiple of.
    group = begin // RUNS * GROUPS + column
    there = (column < GROUPS) & (group < runs // BLOCKS)
    scale, minimum = group_at(second, third, matrix_row, group, runs // BLOCKS, there[None, :], FORMAT)
    if GROUPS <= 2:
        scale, minimum = _first_half(scale), _first_half(minimum)
    if GROUPS == 1:
        scale, minimum = _first_half(scale), _first_half(minimum)
    return scale, minimum


@triton.jit
def _field(
    codes, even, odd, scale, minimum,
    FIELD: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Decode the weights `(OUTPUTS, BYTES)` of one field; int8 codes by the compiler's own conversion."""
    if FORMAT == 1:
        weights = codes.to(tl.int8, bitcast=True).to(KIND)
    else:
        weights = decoded(codes, codes, (even | (odd >> 4)) if FORMAT >= 5 else codes, FIELD, FORMAT)
    if FORMAT >= 3:
        weights = weights * scale
    if FORMAT == 3:
        weights += minimum
    return weights.to(KIND)


@triton.jit
def weights_at(
    codes, second, third, matrix_row, begin, stride, inputs, runs,
    FORMAT: tl.constexpr, FIELDS: tl.constexpr, BLOCKS: tl.constexpr, LIFT: tl.constexpr,
    HAND: tl.constexpr, KIND: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return a tuple of the weights `(OUTPUTS, BYTES)` of each field of some runs of some rows."""
    BYTES: tl.constexpr = RUNS * WIDTH
    own = matrix_row[:, None] * stride
    at = begin * WIDTH + tl.arange(0, BYTES)
    # Rows of one byte or more per weight are not padded: what follows the last input is the next row.
    limit = inputs if FORMAT <= 2 else runs * WIDTH
    first = tl.load(
        codes + (own * 2 if FORMAT >= 5 else own) + at[None, :], mask=(at < limit)[None, :], other=0
    )
    even, odd, scale, minimum = first, first, 0.0, 0.0
    if FORMAT >= 3:
        scale, minimum = _groups(second, third, matrix_row, begin, runs, BLOCKS, FORMAT, RUNS)
        if FORMAT != 3:
            minimum = tl.zeros_like(minimum)
        if FORMAT >= 5:
            scale = scale * LIFT
        if HAND:
            scale, minimum = scale.to(KIND), minimum.to(KIND)
        scale, minimum = _each(scale, BLOCKS * WIDTH), _each(minimum, BLOCKS * WIDTH)
    if FORMAT >= 5:
        even = _upper_bits(second, own, begin, limit, 0, BYTES, WIDTH)
        odd = _upper_bits(second, own, begin, limit, 1, BYTES, WIDTH)
    if HAND:
        blocks = fields_of(first, even, odd, scale, minimum, FORMAT, tl.bfloat16 == KIND)
    else:
        blocks = nothing()
        for field in tl.static_range(FIELDS):
            blocks = blocks + (_field(first, even, odd, scale, minimum, field, FORMAT, KIND),)  # noqa: RUF005
    return blocks
