"""A tile of packed weights as matrix units take it: of the bytes of some rows, each field a block of weights.

Blocks of bytes have two dimensions, so that a warp reads runs of rows and not a column of them. Nothing but
operations on single elements stands between loads and products, so that bytes go from shared memory to those
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
    """`(OUTPUTS, G)` with each column TIMES times, `(OUTPUTS, G * TIMES)`."""
    wide = tl.broadcast_to(group[:, :, None], (group.shape[0], group.shape[1], TIMES))
    return tl.reshape(wide, (group.shape[0], group.shape[1] * TIMES))


@triton.jit
def _upper_bits(second, own, begin, limit, ODD: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr):
    """Of fp6, `(OUTPUTS, BYTES)`: bytes of the other plane for even runs, or for odd ones, and else zeros.

    Of a run of them the lower nibbles belong to one run of the first plane, the upper ones to the next.
    """
    lane = tl.arange(0, BYTES)
    run = lane // WIDTH
    at = begin * (WIDTH // 2) + (run // 2) * WIDTH + lane % WIDTH
    there = (run % 2 == ODD) & (at < limit // 2)
    return tl.load(second + own + at[None, :], mask=there[None, :], other=0)


@triton.jit
def _field(
    codes, even, odd, scale, minimum,
    FIELD: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Weights `(OUTPUTS, BYTES)` of one field; of bytes by the conversions that the compiler has."""
    if FORMAT == 1:
        weights = codes.to(tl.int8, bitcast=True).to(KIND)
    else:
        weights = decoded(codes, codes, (even | (odd >> 4)) if FORMAT >= 5 else codes, FIELD, FORMAT)
    if FORMAT == 3 or FORMAT == 4:
        weights = weights * scale
    if FORMAT == 3:
        weights += minimum
    return weights.to(KIND)


@triton.jit
def weights_at(
    codes, second, third, matrix_row, begin, stride, inputs, runs,
    FORMAT: tl.constexpr, FIELDS: tl.constexpr, BLOCKS: tl.constexpr, HAND: tl.constexpr,
    KIND: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tuple of the weights `(OUTPUTS, BYTES)` of each field of some runs of some rows."""
    BYTES: tl.constexpr = RUNS * WIDTH
    own = matrix_row[:, None] * stride
    at = begin * WIDTH + tl.arange(0, BYTES)
    # Rows of whole bytes end anywhere: what lies beyond the last input belongs to the next row.
    limit = inputs if FORMAT <= 2 else runs * WIDTH
    first = tl.load(
        codes + (own * 2 if FORMAT >= 5 else own) + at[None, :], mask=(at < limit)[None, :], other=0
    )
    even, odd, scale, minimum = first, first, 0.0, 0.0
    if FORMAT == 3 or FORMAT == 4:
        run = begin + tl.arange(0, RUNS)
        scale, minimum = group_at(second, third, matrix_row, run, runs, (run < runs)[None, :], BLOCKS, FORMAT)
        if FORMAT == 4:
            minimum = tl.zeros_like(minimum)
        if HAND:
            scale, minimum = scale.to(KIND), minimum.to(KIND)
        scale, minimum = _each(scale, WIDTH), _each(minimum, WIDTH)
    if FORMAT >= 5:
        even = _upper_bits(second, own, begin, limit, 0, BYTES, WIDTH)
        odd = _upper_bits(second, own, begin, limit, 1, BYTES, WIDTH)
    if HAND:
        found = fields_of(first, even, odd, scale, minimum, FORMAT, tl.bfloat16 == KIND)
    else:
        found = nothing()
        for field in tl.static_range(FIELDS):
            found = found + (_field(first, even, odd, scale, minimum, field, FORMAT, KIND),)  # noqa: RUF005
    return found
