"""`paged_attention` on the GPU: one kernel for prefill, chunks and decode; few rows are split over the keys.

A program takes some queries of one sequence and all query heads of one kv head (its rows), so that a key is
read once for the whole group. Where there are too few programs to fill the GPU, each takes one split of the
keys, and a second kernel joins the splits by their maxima and sums. Lengths are read from memory, so that a
captured graph serves every length.

Source: Dao 2023 (arXiv 2307.08691), algorithm 1; Dao et al. 2023, "Flash-Decoding", for the splits; Ringlein
et al. 2025 (arXiv 2511.11581), section 4, for rows of grouped heads.

Shapes: T packed tokens, N sequences, H heads, K kv heads, D head dim, P blocks (pages), Z tokens per block, S
    splits.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.attention_tile import LOG2E, attend_tiles, decode_form, parts_of
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Bucket, Build, Launch, generation, processors, refuse
from slipstream.ops.bind import Kernel
from slipstream.ops.kv_cache import CachePart
from slipstream.ops.paged_attention import paged_attention
from slipstream.ops.step import AttentionMask, Step

__all__ = ["BUILDS", "KERNELS", "build_of"]

_MOST_SPLITS = 32


@triton.jit
def _sequence_of(tile, query_starts, sequences, QUERIES: tl.constexpr):
    """Return the sequence that a tile of queries belongs to, and the tile's first query in that sequence."""
    low = tile
    first = 0
    if QUERIES > 1:
        # Sequence n owns the tiles from query_starts[n] // QUERIES + n on; find the last n whose first tile
        # is at or below `tile`.
        low = 0
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            before = tl.load(query_starts + middle) // QUERIES + middle <= tile
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        first = (tile - tl.load(query_starts + low) // QUERIES - low) * QUERIES
    return low, first


@triton.jit
def _range_of(
    split, first, count, length, window,
    HAS_WINDOW: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return where a split begins and ends among the keys that any row sees; splits have whole key tiles."""
    end = tl.minimum(length - count + tl.minimum(first + QUERIES, count), length)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - count + first + 1 - window, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), SPLITS), KEYS) * KEYS
    lower = start + split * share
    upper = tl.minimum(lower + share, end)
    if first >= count:
        upper = lower
    return lower, upper


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def _attend(
    q, k_cache, v_cache, k_scales, v_scales, out, part, weight, query_starts, kv_lens, block_table, alibi,
    sinks, scale, softcap, window, sequences, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    INT8: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr,
    KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    # The last queries of a sequence see most keys and begin first, or they would end long after the others.
    kv_head, split = tl.program_id(0) % KV_HEADS, tl.program_id(1)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    low, first = _sequence_of(tile, query_starts, sequences, QUERIES)
    begin = tl.load(query_starts + low)
    count = tl.load(query_starts + low + 1) - begin
    length = tl.load(kv_lens + low)

    row = tl.arange(0, QUERIES * GROUP)
    query = first + row // GROUP
    head = kv_head * (HEADS // KV_HEADS) + row % GROUP
    inside = (query < count) & (row % GROUP < HEADS // KV_HEADS)
    dim = tl.arange(0, DIMS)
    own = (begin + query).to(tl.int64) * HEADS + head
    real = inside[:, None] & (dim < DIM)[None, :]
    rows = tl.load(q + own[:, None] * DIM + dim[None, :], mask=real, other=0.0)
    position = length - count + query
    lower, upper = _range_of(split, first, count, length, window, HAS_WINDOW, SPLITS, QUERIES, KEYS)

    top = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    slope = total
    if HAS_SINKS:
        # Only one split counts the sink.
        once = inside & (split == 0)
        top = tl.load(sinks + head, mask=once, other=float("-inf")).to(tl.float32) * LOG2E
        total = tl.where(once, 1.0, 0.0)
    if HAS_ALIBI:
        slope = tl.load(alibi + head, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([QUERIES * GROUP, DIMS], tl.float32)
    # Up to `edge` nothing is masked, since every row sees what the first one sees.
    table, edge = block_table + low * table_width, lower
    if QUERIES > 1 and not HAS_WINDOW:
        edge += tl.maximum(tl.minimum(upper, length - count + first + 1) - lower, 0) // KEYS * KEYS
        top, total, sums = attend_tiles(
            rows, top, total, sums, lower, edge, upper, position, slope, table, k_cache, v_cache, k_scales,
            v_scales, kv_head, scale, softcap, window, KV_HEADS, DIM, SIZE, KEYS,
            HAS_ALIBI, HAS_SOFTCAP, HAS_WINDOW, INT8, False,
        )  # fmt: skip
    top, total, sums = attend_tiles(
        rows, top, total, sums, edge, upper, upper, position, slope, table, k_cache, v_cache, k_scales,
        v_scales, kv_head, scale, softcap, window, KV_HEADS, DIM, SIZE, KEYS,
        HAS_ALIBI, HAS_SOFTCAP, HAS_WINDOW, INT8, True,
    )  # fmt: skip
    if SPLITS == 1:
        sums = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + own[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=real)
    else:
        own = own * SPLITS + split
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


def _form(
    group: int, dim: int, queries: int, generation: int, *, itemsize: int = 2, int8: bool = False
) -> tuple[Bucket, Launch]:
    """Choose sizes for tiles of some queries and a group of heads.

    A matrix unit takes at least 16 rows and 16 dims, that of sm_90 64 rows; the older one has fewer registers
    to spare. Products in float32 use no matrix unit: there every tile is small, or it would spill.
    """
    dims, padded = max(triton.next_power_of_2(dim), 16), triton.next_power_of_2(group)
    if queries == 1:
        bucket, launch = decode_form("paged attention, decode", group, dim, itemsize, int8)
        return bucket, replace(launch, sizes={**launch.sizes, "QUERIES": 1})
    wide = dims > 128
    keys = 64 if dims < 128 or (dims == 128 and generation >= 90) else 32
    # A single query per tile would be mistaken for a decode step, whose tiles are numbered differently.
    if itemsize > 2:
        sizes = {"QUERIES": max(16 // padded, 2), "GROUP": padded, "KEYS": 16, "DIMS": dims}
        return _bucket(padded, dims, "float32", int8), Launch(sizes, warps=8 if padded > 8 else 4)
    rows = max(64 // padded, 2) * padded
    sizes = {"QUERIES": rows // padded, "GROUP": padded, "KEYS": 32 if rows > 128 else keys, "DIMS": dims}
    # With two stages, heads of 64 spill on sm_80.
    stages = 3 if dims <= 64 and generation < 90 else 2
    return _bucket(padded, dims, "", int8), Launch(sizes, warps=8 if wide or rows > 64 else 4, stages=stages)


def _bucket(group: int, dims: int, dtype: str, int8: bool) -> Bucket:
    shape = ", ".join([f"{group} x {dims}", *(["int8"] if int8 else []), *([dtype] if dtype else [])])
    queries = tuple(n // group for n in (16, 32, 64, 128, 256) if n // group >= 2)
    choices = {"QUERIES": queries, "KEYS": (16, 32, 64, 128)}
    return Bucket("paged attention, prefill", shape, choices, warps=(4, 8), stages=(1, 2, 3, 4))


def _splits(programs: int, device: torch.device) -> int:
    """Return the number of splits of the keys, a power of two, for about two programs per multiprocessor."""
    wanted = -(-2 * processors(device) // programs)
    return min(int(triton.next_power_of_2(max(wanted, 1))), _MOST_SPLITS)


def _launch(
    q: Tensor,
    caches: list[Tensor],
    step: list[Tensor],
    alibi: Tensor | None,
    sinks: Tensor | None,
    scales: list[float],
    limits: list[int],
) -> Tensor:
    query_starts, kv_lens, block_table = step
    (scale, softcap), (window, max_query_len) = scales, limits
    tokens, heads, dim = q.shape
    (_, size, kv_heads, _), sequences = caches[0].shape, kv_lens.shape[0]
    q = q.contiguous()
    out = torch.empty_like(q)
    number, int8 = generation(q.device), caches[0].dtype == torch.int8
    form = _form(heads // kv_heads, dim, max_query_len, number, itemsize=q.element_size(), int8=int8)
    launch = launched(*form, number)
    tiles = sequences if max_query_len == 1 else tokens // launch.sizes["QUERIES"] + sequences
    splits = _splits(tiles * kv_heads, q.device)
    rows = tokens * heads
    part = q.new_empty((rows, splits, dim) if splits > 1 else 0, dtype=torch.float32)
    weight = q.new_empty((rows, splits, 2) if splits > 1 else 0, dtype=torch.float32)
    tensors = (q, *caches, out, part, weight, query_starts, kv_lens, block_table)
    masks = (q if alibi is None else alibi, q if sinks is None else sinks)
    numbers = (scale, softcap, window, sequences, block_table.shape[1])
    _attend[(tiles * kv_heads, splits)](
        *tensors,
        *masks,
        *numbers,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        SIZE=size,
        HAS_ALIBI=alibi is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap > 0,
        HAS_WINDOW=window > 0,
        INT8=int8,
        SPLITS=splits,
        **launch.options(),
    )
    if splits > 1:
        _join[(rows,)](part, weight, out, DIM=dim, SPLITS=splits, DIMS=launch.sizes["DIMS"], num_warps=4)
    return out


_paged_attention = operator(
    "paged_attention(Tensor q, Tensor[] caches, Tensor[] step, Tensor? alibi, Tensor? sinks, float[] scales, "
    "int[] limits) -> Tensor",
    _launch,
    lambda q, *rest: torch.empty_like(q),
)


def _run(q: Tensor, k_cache: CachePart, v_cache: CachePart, step: Step, *, mask: AttentionMask) -> Tensor:
    if mask.chunk is not None:
        return paged_attention(q, k_cache, v_cache, step, mask=mask)
    (keys, k_scales), (values, v_scales) = parts_of(k_cache), parts_of(v_cache)
    return _paged_attention(  # type: ignore[no-any-return]
        q,
        [keys, values, k_scales, v_scales],
        [step.query_starts, step.kv_lens, step.block_table],
        mask.alibi,
        mask.sinks,
        [mask.scale, mask.softcap or 0.0],
        [mask.window or 0, step.max_query_len],
    )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

KERNELS = (Kernel("paged_attention", "triton", "cuda", functools.partial(refuse, dtypes=_DTYPES), _run),)


def build_of(
    name: str, heads: int, kv_heads: int, dim: int, queries: int, splits: int, *, int8: bool = False
) -> list[Build]:
    """Return a build per GPU generation for some heads, `queries` per sequence and keys in `splits`."""
    types = dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16")
    types |= dict.fromkeys(("k_cache", "v_cache"), "*i8") if int8 else {}
    types |= dict.fromkeys(("part", "weight", "alibi", "sinks", "k_scales", "v_scales"), "*fp32")
    types |= dict.fromkeys(("query_starts", "kv_lens", "block_table"), "*i32")
    types |= {"scale": "fp32", "softcap": "fp32", "window": "i32", "sequences": "i32", "table_width": "i32"}
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "SIZE": 32, "SPLITS": splits, "INT8": int8}
    constants |= dict.fromkeys(("HAS_ALIBI", "HAS_SINKS", "HAS_SOFTCAP", "HAS_WINDOW"), False)
    builds = []
    for number in (80, 90):
        bucket, launch = _form(heads // kv_heads, dim, queries, number, int8=int8)
        needs = ("HMMA",) if queries == 1 or number < 90 else ("HGMMA",)
        targets = (f"sm_{number}", "gfx942") if number == 90 else (f"sm_{number}",)
        what = f"paged attention, {name}, sm_{number}"
        form = Build(what, _attend, types | constants, launch, wide_loads=2, needs=needs, targets=targets)
        builds.append(replace(form, bucket=bucket))
    return builds


BUILDS = (
    *build_of("decode, 32/8 heads of 128", 32, 8, 128, 1, 16),
    *build_of("decode, 32/4 heads of 64", 32, 4, 64, 1, 16),
    *build_of("decode, 32/8 heads of 128, int8", 32, 8, 128, 1, 16, int8=True),
    *build_of("prefill, 32/8 heads of 128", 32, 8, 128, 512, 1),
    *build_of("prefill, 32/8 heads of 128, int8", 32, 8, 128, 512, 1, int8=True),
    *build_of("prefill, 12/12 heads of 64", 12, 12, 64, 512, 1),
    *build_of("prefill, 8/4 heads of 256", 8, 4, 256, 512, 1),
    Build(
        "paged attention, join, 128",
        _join,
        {"part": "*fp32", "weight": "*fp32", "out": "*bf16", "DIM": 128, "SPLITS": 16},
        Launch({"DIMS": 128}),
        wide_loads=1,
    ),
)
