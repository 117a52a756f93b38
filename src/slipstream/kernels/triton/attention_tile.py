"""Code that the attention kernels share: attention to one tile of keys, and the sum of the splits.

Source: Dao 2023 (arXiv 2307.08691), algorithm 1; Dao et al. 2023, "Flash-Decoding", for the splits.

Shapes: R rows (queries times grouped heads), N keys of a tile, D head dim, K kv heads, Z tokens per cache
    block, S splits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.target import Bucket, Launch
from slipstream.ops.kv_cache import CachePart, Int8Cache

__all__ = ["LOG2E", "attend_tiles", "bent", "decode_form", "join_splits", "parts_of"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def bent(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Apply the soft cap, if there is one, to scores."""
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _rows_at(cache, scales, place, dim, seen, there, DIM: tl.constexpr, INT8: tl.constexpr):
    """Load keys or values `(N, D)` at some places of a cache, as stored, and the scale of each."""
    rows = tl.load(cache + (place * DIM)[:, None] + dim[None, :], mask=seen, other=0.0)
    scale = 1.0
    if INT8:
        scale = tl.load(scales + place, mask=there, other=0.0)
    return rows, scale


@triton.jit
def attend_tiles(
    rows, top, total, sums, begin, end, upper, position, slope, table, k_cache, v_cache, k_scales, v_scales,
    kv_head, scale, softcap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, INT8: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Apply `_attend_tile` to the keys from `begin` to `end`, tile by tile."""
    for key_begin in range(begin, end, KEYS):
        top, total, sums = _attend_tile(
            rows, top, total, sums, key_begin + tl.arange(0, KEYS), upper, position, slope, table,
            k_cache, v_cache, k_scales, v_scales, kv_head, scale, softcap, window,
            KV_HEADS, DIM, SIZE, HAS_ALIBI, HAS_SOFTCAP, HAS_WINDOW, INT8, EDGE,
        )  # fmt: skip
    return top, total, sums


@triton.jit
def _attend_tile(
    rows, top, total, sums, key, upper, position, slope, table, k_cache, v_cache, k_scales, v_scales,
    kv_head, scale, softcap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, INT8: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Update the maxima, sums of weights and weighted values of rows `(R, D)` by a tile of keys `(N,)`.

    `table` points to the sequence's row of the block table; keys from `upper` on do not exist. Besides two
    products, a tile costs what is done per score: away from the EDGE every row sees every key, and nothing is
    masked.
    """
    dim = tl.arange(0, sums.shape[1])
    there = key < upper if EDGE else key >= 0
    block = tl.load(table + key // SIZE, mask=there, other=0).to(tl.int64)
    place = (block * SIZE + key % SIZE) * KV_HEADS + kv_head
    seen = there[:, None] & (dim < DIM)[None, :]
    keys, k_scale = _rows_at(k_cache, k_scales, place, dim, seen, there, DIM, INT8)
    scores = tl.dot(rows, tl.trans(keys.to(rows.dtype)), input_precision="ieee")
    times = scale if HAS_SOFTCAP or HAS_ALIBI else scale * LOG2E
    scores = scores * (k_scale * times)[None, :] if INT8 else scores * times
    if HAS_SOFTCAP or HAS_ALIBI:
        scores = bent(scores, softcap, HAS_SOFTCAP)
        if HAS_ALIBI:
            scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        scores = scores * LOG2E
    if EDGE:
        visible = there[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    known = tl.where(highest == float("-inf"), 0.0, highest)
    chances = tl.exp2(scores - known[:, None])
    factor = tl.exp2(top - known)
    total = total * factor + tl.sum(chances, 1)
    values, v_scale = _rows_at(v_cache, v_scales, place, dim, seen, there, DIM, INT8)
    if INT8:
        chances = chances * v_scale[None, :]
    sums = sums * factor[:, None] + tl.dot(
        chances.to(rows.dtype), values.to(rows.dtype), input_precision="ieee"
    )
    return highest, total, sums


@triton.jit
def join_splits(
    part, weight, row, real, splits, DIM: tl.constexpr, SPLITS: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Return the attention `(R, D)` of some rows from what the first `splits` of SPLITS splits stored.

    Loads bypass the L1 cache, which does not see what other multiprocessors wrote meanwhile.
    """
    dim = tl.arange(0, DIMS)
    inside = real[:, None] & (dim < DIM)[None, :]
    top = tl.full(row.shape, float("-inf"), tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    sums = tl.zeros([row.shape[0], DIMS], tl.float32)
    for split in range(splits):
        own = row * SPLITS + split
        split_top = tl.load(weight + own * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
        split_total = tl.load(weight + own * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
        at = part + own[:, None] * DIM + dim[None, :]
        split_sums = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(top, split_top)
        known = tl.where(highest == float("-inf"), 0.0, highest)
        before = tl.exp2(top - known)
        now = tl.exp2(split_top - known)
        total = total * before + split_total * now
        sums = sums * before[:, None] + split_sums * now[:, None]
        top = highest
    return sums / tl.where(total > 0, total, 1.0)[:, None]


def decode_form(kernel: str, group: int, dim: int, itemsize: int, int8: bool) -> tuple[Bucket, Launch]:
    """Choose sizes for one query of a group of heads; a matrix unit takes at least 16 rows and 16 dims."""
    dims, rows = max(int(triton.next_power_of_2(dim)), 16), max(int(triton.next_power_of_2(group)), 16)
    keys = 64 if dims <= 128 and rows <= 64 else 32
    if itemsize > 2:  # products in float32 use no matrix unit, and larger tiles spill
        keys = 16
    sizes = {"GROUP": rows, "KEYS": keys, "DIMS": dims}
    launch = Launch(sizes, warps=8 if rows * dims > 8192 else 4, stages=3 if itemsize <= 2 else 1)
    shape = f"{rows} x {dims}{', int8' if int8 else ''}{', float32' if itemsize > 2 else ''}"
    return Bucket(kernel, shape, {"KEYS": (16, 32, 64, 128)}, warps=(2, 4, 8), stages=(1, 2, 3, 4)), launch


def parts_of(cache: CachePart) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of an int8 cache; for other caches the cache itself, twice."""
    return (cache.codes, cache.scales) if isinstance(cache, Int8Cache) else (cache, cache)
