"""A token's heads between the projection and attention or the cache, inside kernels: norm, rope, rounding.

Shapes: R heads, D head dim, H heads of a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["head_rows", "kept"]


@triton.jit
def _gained(x, gain, at, offset, root, real):
    """Multiply rows `(R, D)` by the norm's inverse root and its weight."""
    return x * root * (tl.load(gain + at, mask=real, other=0.0).to(tl.float32) + offset)


@triton.jit
def head_rows(
    x, head, inside, gain_row, gain, cos, sin, angle_step, eps, offset, clip,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    HAS_CLIP: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Load some heads of a token, `(R, D)` float32, and normalise, clip and rotate them as the layer does.

    NORM 1 is an RMS norm before the rotation, 2 one after it, 0 none; `gain_row` is the row of its weight.
    """
    dim = tl.arange(0, DIMS)
    # Each dim is rotated by its angle together with its partner; dims beyond the rotated ones stay as is.
    rotated = dim < 2 * HALF
    if INTERLEAVED:
        angle = dim // 2
        first = dim % 2 == 0
        partner = tl.where(first, dim + 1, dim - 1)
    else:
        angle = dim % max(HALF, 1)
        first = dim < HALF
        partner = tl.where(first, dim + HALF, dim - HALF)
    real = inside[:, None] & (dim < DIM)[None, :]
    paired = real & rotated[None, :]
    a = tl.load(x + head[:, None] * DIM + dim[None, :], mask=real, other=0.0).to(tl.float32)
    b = tl.load(x + head[:, None] * DIM + partner[None, :], mask=paired, other=0.0).to(tl.float32)
    if NORM == 1:
        root = tl.rsqrt(tl.sum(a * a, 1) / DIM + eps)[:, None]
        a = _gained(a, gain, gain_row[:, None] * DIM + dim[None, :], offset, root, real)
        b = _gained(b, gain, gain_row[:, None] * DIM + partner[None, :], offset, root, paired)
    if HAS_CLIP:
        a = tl.minimum(tl.maximum(a, -clip), clip)
        b = tl.minimum(tl.maximum(b, -clip), clip)
    if HALF > 0:
        c = tl.load(cos + angle * angle_step, mask=rotated, other=1.0).to(tl.float32)
        s = tl.load(sin + angle * angle_step, mask=rotated, other=0.0).to(tl.float32)
        a = tl.where(rotated[None, :], a * c[None, :] + b * tl.where(first, -s, s)[None, :], a)
    if NORM == 2:
        root = tl.rsqrt(tl.sum(a * a, 1) / DIM + eps)[:, None]
        a = _gained(a, gain, gain_row[:, None] * DIM + dim[None, :], offset, root, real)
    return a


@triton.jit
def kept(x, cache, scales, place, writes, like, DIM: tl.constexpr, INT8: tl.constexpr):
    """Return new rows `(R, D)` as the cache rounds them, in float32; where `writes`, store them at `place`.

    They are first rounded to `like`, the layer's dtype.
    """
    dim = tl.arange(0, x.shape[1])[None, :]
    inside = (dim < DIM) & writes[:, None]
    row = place[:, None] * DIM
    x = x.to(like).to(tl.float32)
    if INT8:
        scale = tl.max(tl.abs(x), 1) / 127.0
        codes = x / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
        codes = (codes + 12582912.0) - 12582912.0  # rounds to the nearest integer, ties to even
        tl.store(scales + place, scale, mask=writes)
        tl.store(cache + row + dim, codes.to(tl.int8), mask=inside)
        x = codes * scale[:, None]
    else:
        tl.store(cache + row + dim, x.to(cache.dtype.element_ty), mask=inside)
        x = x.to(cache.dtype.element_ty).to(tl.float32)
    return x
