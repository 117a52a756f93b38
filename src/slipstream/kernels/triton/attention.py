"""`paged_attention` on the GPU: prefill, chunks and decode by one kernel, split over keys where rows are few.

A program takes some queries of one sequence and all query heads of one kv head (its rows), so that a key is
read once for the whole group. Where there are too few programs to fill the GPU, each takes one split of the
keys, and a second kernel joins the splits by their maxima and sums. Lengths are read from memory: a captured
graph serves every length.

Source: Dao 2023 (arXiv 2307.08691), algorithm 1; Dao et al. 2023, "Flash-Decoding", for the splits; Ringlein
et al. 2025 (arXiv 2511.11581), section 4, for rows of grouped heads.

Shapes: T packed tokens, N sequences, H heads, K kv heads, D head dim, P blocks (pages), Z tokens per block, S
    splits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.target import Build, Launch, generation, processors, refuse
from slipstream.ops.bind import Kernel
from slipstream.ops.kv_cache import CachePart, Int8Cache
from slipstream.ops.paged_attention import paged_attention
from slipstream.ops.step import AttentionMask, Step

__all__ = ["BUILDS", "KERNELS"]

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_MOST_SPLITS = 32


@triton.jit
def _attend(
    q,
    k_cache,
    v_cache,
    out,
    part,
    weight,
    query_starts,
    kv_lens,
    block_table,
    alibi,
    sinks,
    scale,
    softcap,
    window,
    sequences,
    table_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    low = tile
    if QUERIES > 1:
        # Sequence n owns the tiles from query_starts[n] // QUERIES + n on; ours is the last n at or below
        # `tile`.
        low = 0
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            before = tl.load(query_starts + middle) // QUERIES + middle <= tile
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
    begin = tl.load(query_starts + low)
    count = tl.load(query_starts + low + 1) - begin
    first = 0
    if QUERIES > 1:
        first = (tile - begin // QUERIES - low) * QUERIES
    length = tl.load(kv_lens + low)

    row = tl.arange(0, QUERIES * GROUP)
    query = first + row // GROUP
    head = kv_head * (HEADS // KV_HEADS) + row % GROUP
    inside = (query < count) & (row % GROUP < HEADS // KV_HEADS)
    dim = tl.arange(0, DIMS)
    at = ((begin + query).to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
    real = inside[:, None] & (dim < DIM)[None, :]
    rows = tl.load(q + at, mask=real, other=0.0)
    position = length - count + query

    # Keys that any row of the tile sees, cut into splits of whole key tiles.
    end = tl.minimum(length - count + tl.minimum(first + QUERIES, count), length)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - count + first + 1 - window, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), SPLITS), KEYS) * KEYS
    lower = start + split * share
    upper = tl.minimum(lower + share, end)
    if first >= count:
        upper = lower

    top = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    if HAS_SINKS:
        # One split alone counts the sink.
        own = inside & (split == 0)
        top = tl.load(sinks + head, mask=own, other=float("-inf")).to(tl.float32) * _LOG2E
        total = tl.where(own, 1.0, 0.0)
    if HAS_ALIBI:
        slope = tl.load(alibi + head, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([QUERIES * GROUP, DIMS], tl.float32)
    for key_begin in range(lower, upper, KEYS):
        key = key_begin + tl.arange(0, KEYS)
        there = key < upper
        block = tl.load(block_table + low * table_width + key // SIZE, mask=there, other=0).to(tl.int64)
        place = ((block * SIZE + key % SIZE) * KV_HEADS + kv_head) * DIM
        seen = there[:, None] & (dim < DIM)[None, :]
        keys = tl.load(k_cache + place[:, None] + dim[None, :], mask=seen, other=0.0).to(rows.dtype)
        scores = tl.dot(rows, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if HAS_ALIBI:
            scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        visible = there[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores * _LOG2E, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        known = tl.where(highest == float("-inf"), 0.0, highest)
        chances = tl.exp2(scores - known[:, None])
        factor = tl.exp2(top - known)
        total = total * factor + tl.sum(chances, 1)
        values = tl.load(v_cache + place[:, None] + dim[None, :], mask=seen, other=0.0).to(rows.dtype)
        sums = sums * factor[:, None] + tl.dot(chances.to(rows.dtype), values, input_precision="ieee")
        top = highest

    if SPLITS == 1:
        sums = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=real)
    else:
        own = ((begin + query).to(tl.int64) * HEADS + head) * SPLITS + split
        tl.store(part + own[:, None] * DIM + dim[None, :], sums, mask=real)
        tl.store(weight + own * 2, top, mask=inside)
        tl.store(weight + own * 2 + 1, total, mask=inside)


@triton.jit
def _join(part, weight, out, DIM: tl.constexpr, SPLITS: tl.constexpr, DIMS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIMS)
    top = tl.load(weight + (row * SPLITS + split) * 2)
    total = tl.load(weight + (row * SPLITS + split) * 2 + 1)
    factor = tl.where(total > 0, tl.exp2(top - tl.max(top, 0)), 0.0)
    inside = (dim < DIM)[None, :]
    sums = tl.load(part + (row * SPLITS + split)[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    joined = tl.sum(sums * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(out + row * DIM + dim, joined.to(out.dtype.element_ty), mask=dim < DIM)


def _launch_of(group: int, dim: int, queries: int, generation: int) -> Launch:
    """Sizes for rows of some queries and a group of heads.

    A matrix unit wants at least 16 rows and 16 dims, that of sm_90 64 rows; the older one has fewer registers
    to spare.
    """
    dims, padded = max(triton.next_power_of_2(dim), 16), triton.next_power_of_2(group)
    if queries == 1:
        sizes = {"QUERIES": 1, "GROUP": max(padded, 16), "KEYS": 64 if dims <= 128 else 32, "DIMS": dims}
        return Launch(sizes, warps=4, stages=3)
    wide = dims > 128
    keys = 64 if dims < 128 or (dims == 128 and generation >= 90) else 32
    # A single query per tile would be taken for a decode step, whose tiles are numbered otherwise.
    sizes = {"QUERIES": max(64 // padded, 2), "GROUP": padded, "KEYS": keys, "DIMS": dims}
    return Launch(sizes, warps=8 if wide else 4, stages=2)


def _splits(programs: int, device: torch.device) -> int:
    """Splits of the keys, a power of two, that let about two programs run on each processor."""
    wanted = -(-2 * processors(device) // programs)
    return min(int(triton.next_power_of_2(max(wanted, 1))), _MOST_SPLITS)


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: list[Tensor],
    alibi: Tensor | None,
    sinks: Tensor | None,
    scales: list[float],
    limits: list[int],
) -> Tensor:
    query_starts, kv_lens, block_table = step
    (scale, softcap), (window, max_query_len) = scales, limits
    tokens, heads, dim = q.shape
    kv_heads, sequences = k_cache.shape[2], kv_lens.shape[0]
    q = q.contiguous()
    out = torch.empty_like(q)
    launch = _launch_of(heads // kv_heads, dim, max_query_len, generation(q.device))
    tiles = sequences if max_query_len == 1 else tokens // launch.sizes["QUERIES"] + sequences
    splits = _splits(tiles * kv_heads, q.device)
    rows = tokens * heads
    part = q.new_empty((rows, splits, dim) if splits > 1 else 0, dtype=torch.float32)
    weight = q.new_empty((rows, splits, 2) if splits > 1 else 0, dtype=torch.float32)
    tensors = (q, k_cache, v_cache, out, part, weight, query_starts, kv_lens, block_table)
    masks = (q if alibi is None else alibi, q if sinks is None else sinks)
    numbers = (scale, softcap, window, sequences, block_table.shape[1])
    _attend[(tiles, kv_heads, splits)](
        *tensors,
        *masks,
        *numbers,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        SIZE=k_cache.shape[1],
        HAS_ALIBI=alibi is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap > 0,
        HAS_WINDOW=window > 0,
        SPLITS=splits,
        **launch.options(),
    )
    if splits > 1:
        _join[(rows,)](part, weight, out, DIM=dim, SPLITS=splits, DIMS=launch.sizes["DIMS"], num_warps=4)
    return out


_paged_attention = operator(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor[] step, Tensor? alibi, Tensor? sinks, "
    "float[] scales, int[] limits) -> Tensor",
    _launch,
    lambda q, *rest: torch.empty_like(q),
)


def _run(q: Tensor, k_cache: CachePart, v_cache: CachePart, step: Step, *, mask: AttentionMask) -> Tensor:
    if isinstance(k_cache, Int8Cache) or isinstance(v_cache, Int8Cache):
        return paged_attention(q, k_cache, v_cache, step, mask=mask)  # codes are read by torch alone
    return _paged_attention(  # type: ignore[no-any-return]
        q,
        k_cache,
        v_cache,
        [step.query_starts, step.kv_lens, step.block_table],
        mask.alibi,
        mask.sinks,
        [mask.scale, mask.softcap or 0.0],
        [mask.window or 0, step.max_query_len],
    )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

KERNELS = (Kernel("paged_attention", "triton", "cuda", functools.partial(refuse, dtypes=_DTYPES), _run),)


def _build(name: str, heads: int, kv_heads: int, dim: int, queries: int, splits: int) -> list[Build]:
    types = dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16")
    types |= dict.fromkeys(("part", "weight", "alibi", "sinks"), "*fp32")
    types |= dict.fromkeys(("query_starts", "kv_lens", "block_table"), "*i32")
    types |= {"scale": "fp32", "softcap": "fp32", "window": "i32", "sequences": "i32", "table_width": "i32"}
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "SIZE": 32, "SPLITS": splits}
    constants |= dict.fromkeys(("HAS_ALIBI", "HAS_SINKS", "HAS_SOFTCAP", "HAS_WINDOW"), False)
    return [
        Build(
            f"paged attention, {name}, sm_{number}",
            _attend,
            types | constants,
            _launch_of(heads // kv_heads, dim, queries, number),
            wide_loads=2,
            needs=("HMMA",) if queries == 1 or number < 90 else ("HGMMA",),
            targets=(f"sm_{number}", "gfx942") if number == 90 else (f"sm_{number}",),
        )
        for number in (80, 90)
    ]


BUILDS = (
    *_build("decode, 32/8 heads of 128", 32, 8, 128, 1, 16),
    *_build("decode, 32/4 heads of 64", 32, 4, 64, 1, 16),
    *_build("prefill, 32/8 heads of 128", 32, 8, 128, 512, 1),
    *_build("prefill, 12/12 heads of 64", 12, 12, 64, 512, 1),
    *_build("prefill, 8/4 heads of 256", 8, 4, 256, 512, 1),
    Build(
        "paged attention, join, 128",
        _join,
        {"part": "*fp32", "weight": "*fp32", "out": "*bf16", "DIM": 128, "SPLITS": 16},
        Launch({"DIMS": 128}),
        wide_loads=1,
    ),
)
