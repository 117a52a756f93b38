"""Everything in a decode step between a layer's qkv projection and its output projection, in one launch.

A program takes one sequence, one kv head with the query heads that share it, and one split of the keys. It
normalises and rotates its queries as it loads them. The new key and value are not read back from the cache:
the first split attends to them in registers, and writes them to their slots. The program that finishes last,
by a counter of arrivals, joins the splits of its group.

Source: as `attention`; "stream-K" style fix-up by the last to arrive as in Osama et al. 2023 (arXiv
2301.03598), section 5.2.

Shapes: T tokens, one per sequence; H heads, K kv heads, D head dim, P blocks (pages), Z tokens per block,
    S splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.attention_tile import (
    LOG2E,
    attend_tiles,
    bent,
    decode_form,
    join_splits,
    parts_of,
)
from slipstream.kernels.triton.heads import head_rows, kept
from slipstream.kernels.triton.overlap import let_in, overlapping, overlaps, wait_for_predecessor
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Build, generation, processors
from slipstream.ops.kv_cache import CachePart
from slipstream.ops.step import AttentionMask, Step

__all__ = ["BUILDS", "Heads", "attend_one", "build_of"]

_MOST_SPLITS = 32
_LEAST: tl.constexpr = tl.constexpr(2)
"""Minimum number of key tiles per split."""


@triton.jit
def _begun(
    rows, key, value, sinks, head, inside, scale, softcap, counts,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return initial maxima, sums of weights and weighted values: after the new key `(1, D)` and the sink.

    That is for the single split that `counts` them; the others begin empty.
    """
    score = bent(tl.sum(rows.to(tl.float32) * key, 1) * scale, softcap, HAS_SOFTCAP) * LOG2E
    top = score
    total = tl.full(score.shape, 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=inside, other=float("-inf")).to(tl.float32) * LOG2E
        top = tl.maximum(score, sink)
        total = tl.exp2(score - top) + tl.exp2(sink - top)
    sums = tl.exp2(score - top)[:, None] * value
    top = tl.where(counts, top, float("-inf"))
    return top, tl.where(counts, total, 0.0), tl.where(counts, sums, 0.0)


@triton.jit
def _range_of(position, window, HAS_WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """Return the first of the older keys that the new token sees, and the keys per split, in whole tiles.

    A split costs more than a tile or two, so fewer splits may be used than were launched.
    """
    start = position * 0
    if HAS_WINDOW:
        start = tl.maximum(position + 1 - window, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(tl.maximum(position - start, 0), SPLITS), KEYS) * KEYS
    return start, tl.maximum(share, _LEAST * KEYS)


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def _attend_one(
    qkv, cos, sin, q_gain, k_gain, k_cache, v_cache, k_scales, v_scales, out, part, weight, arrived,
    kv_lens, block_table, slots, alibi, sinks,
    scale, softcap, eps, offset, clip, window, table_width, angle_row, angle_step,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    OWN_GAINS: tl.constexpr, HAS_CLIP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, INT8: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # Lengths and slots were written before the predecessor, which has waited for the kernel that did so.
    position = tl.load(kv_lens + sequence) - 1
    new = tl.arange(0, 1) + kv_head
    place = tl.load(slots + sequence) * KV_HEADS + new
    wait_for_predecessor(OVERLAPS)
    let_in(OVERLAPS)
    start, share = _range_of(position, window, HAS_WINDOW, SPLITS, KEYS)
    splits = tl.maximum(tl.cdiv(position - start, share), 1)
    if split >= splits:
        return
    like = qkv.dtype.element_ty
    row = tl.arange(0, GROUP)
    inside = row < HEADS // KV_HEADS
    head = kv_head * (HEADS // KV_HEADS) + row
    qkv += sequence * (HEADS + 2 * KV_HEADS) * DIM
    cos, sin = cos + sequence * angle_row, sin + sequence * angle_row
    rows = head_rows(
        qkv, head, inside, head * OWN_GAINS, q_gain, cos, sin, angle_step, eps, offset, clip,
        DIM, HALF, INTERLEAVED, Q_NORM, HAS_CLIP, DIMS,
    ).to(like)  # fmt: skip
    key = head_rows(
        qkv, HEADS + new, new >= 0, new * OWN_GAINS, k_gain, cos, sin, angle_step, eps, offset, clip,
        DIM, HALF, INTERLEAVED, K_NORM, HAS_CLIP, DIMS,
    )  # fmt: skip
    value = head_rows(
        qkv, HEADS + KV_HEADS + new, new >= 0, new, k_gain, cos, sin, angle_step, eps, offset, clip,
        DIM, 0, False, 0, HAS_CLIP, DIMS,
    )  # fmt: skip
    writes = (new >= 0) & (split == 0)
    key = kept(key, k_cache, k_scales, place, writes, like, DIM, INT8)
    value = kept(value, v_cache, v_scales, place, writes, like, DIM, INT8)
    top, total, sums = _begun(
        rows, key, value, sinks, head, inside, scale, softcap, split == 0, HAS_SINKS, HAS_SOFTCAP
    )
    slope = tl.load(alibi + head, mask=inside, other=0.0).to(tl.float32) if HAS_ALIBI else total
    lower = start + split * share
    upper = tl.minimum(lower + share, position)
    top, total, sums = attend_tiles(
        rows, top, total, sums, lower, upper, upper, position + row * 0, slope,
        block_table + sequence * table_width, k_cache, v_cache, k_scales, v_scales, kv_head, scale, softcap,
        window, KV_HEADS, DIM, SIZE, KEYS, HAS_ALIBI, HAS_SOFTCAP, HAS_WINDOW, INT8, True,
    )  # fmt: skip
    _finish(
        top, total, sums, out, part, weight, arrived, sequence * HEADS + head, inside,
        sequence * KV_HEADS + kv_head, split, splits, DIM, SPLITS, DIMS,
    )  # fmt: skip


@triton.jit
def _finish(
    top, total, sums, out, part, weight, arrived, row, inside, group, split, splits,
    DIM: tl.constexpr, SPLITS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Store the attention, or a split's part of it; the last split to arrive then joins all of them."""
    dim = tl.arange(0, DIMS)
    real = inside[:, None] & (dim < DIM)[None, :]
    place = out + row[:, None] * DIM + dim[None, :]
    attended = (sums / total[:, None]).to(out.dtype.element_ty)
    if SPLITS == 1 or splits == 1:
        tl.store(place, attended, mask=real)
    else:
        own = row * SPLITS + split
        tl.store(part + own[:, None] * DIM + dim[None, :], sums, mask=real)
        tl.store(weight + own * 2, top, mask=inside)
        tl.store(weight + own * 2 + 1, total, mask=inside)
        # All threads store before one of them counts the arrival, which releases the stores of all.
        tl.debug_barrier()
        if tl.atomic_add(arrived + group, 1, sem="acq_rel") == splits - 1:
            joined = join_splits(part, weight, row, inside, splits, DIM, SPLITS, DIMS)
            tl.store(place, joined.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True)
class Heads:
    """The operations that a layer applies to its heads before attention.

    Attributes:
        heads: H.
        kv_heads: K.
        dim: D.
        rope: Cosines and sines, `(T, R / 2)` each, of equal strides; or None.
        interleaved: Whether the two dims of a rotated pair are neighbours.
        norm: 0 for none, 1 for an RMS norm of each head before the rotation, 2 for one after it.
        gains: The norm's weights for queries and for keys, `(D,)` or `(heads, D)`; None where these are not
            normalised.
        eps: The norm's epsilon.
        offset: Added to the norm's weights.
        clip: Bound of queries, keys and values before the rotation; 0 for none.
    """

    heads: int
    kv_heads: int
    dim: int
    rope: tuple[Tensor, Tensor] | None = None
    interleaved: bool = False
    norm: int = 0
    gains: tuple[Tensor | None, Tensor | None] = field(default=(None, None))
    eps: float = 0.0
    offset: float = 0.0
    clip: float = 0.0


def _splits(programs: int, device: torch.device) -> int:
    """Return the number of splits of the keys, a power of two, for about two programs per multiprocessor."""
    wanted = -(-2 * processors(device) // programs)
    return min(int(triton.next_power_of_2(max(wanted, 1))), _MOST_SPLITS)


def _launch(
    qkv: Tensor,
    optional: list[Tensor | None],
    caches: list[Tensor],
    step: list[Tensor],
    arrived: Tensor,
    numbers: list[float],
    sizes: list[int],
) -> Tensor:
    cos, sin, q_gain, k_gain, alibi, sinks = optional
    kv_lens, block_table, slots = step
    heads, kv_heads, dim, interleaved, norm, window = sizes
    tokens = qkv.shape[0]
    int8 = caches[0].dtype == torch.int8
    form = decode_form("decode step", heads // kv_heads, dim, qkv.element_size(), int8)
    number = generation(qkv.device)
    launch = launched(*form, number)
    splits = _splits(tokens * kv_heads, qkv.device)
    out = qkv.new_empty(tokens, heads * dim)
    part = qkv.new_empty((tokens * heads, splits, dim) if splits > 1 else 0, dtype=torch.float32)
    weight = qkv.new_empty((tokens * heads, splits, 2) if splits > 1 else 0, dtype=torch.float32)
    given = [qkv if tensor is None else tensor for tensor in optional]
    gains = [gain for gain in (q_gain, k_gain) if gain is not None]
    _attend_one[(tokens, kv_heads, splits)](
        *(qkv, *given[:4], *caches, out, part, weight, arrived, kv_lens, block_table, slots, *given[4:]),
        *(*numbers, window, block_table.stride(0)),
        *((0, 0) if cos is None else cos.stride()),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        SIZE=caches[0].shape[1],
        HALF=0 if cos is None else cos.shape[-1],
        INTERLEAVED=bool(interleaved),
        Q_NORM=0 if q_gain is None else norm,
        K_NORM=0 if k_gain is None else norm,
        OWN_GAINS=int(any(gain.numel() > dim for gain in gains)),
        HAS_CLIP=numbers[4] > 0,
        HAS_ALIBI=alibi is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=numbers[1] > 0,
        HAS_WINDOW=window > 0,
        INT8=int8,
        SPLITS=splits,
        OVERLAPS=overlaps(number),
        **launch.options(),
        **overlapping(number),
    )
    return out


_attend_step = operator(
    "attend_one(Tensor qkv, Tensor?[] optional, Tensor(a!)[] caches, Tensor[] step, Tensor(b!) arrived, "
    "float[] numbers, int[] sizes) -> Tensor",
    _launch,
    lambda qkv, optional, caches, step, arrived, numbers, sizes: qkv.new_empty(
        qkv.shape[0], sizes[0] * sizes[2]
    ),
)


def attend_one(
    qkv: Tensor,
    heads: Heads,
    caches: tuple[CachePart, CachePart],
    step: Step,
    mask: AttentionMask,
    arrived: Tensor,
) -> Tensor:
    """Return the attention of one new token per sequence, and write its key and value to the cache.

    Args:
        qkv: `(T, (H + 2K) D)`, contiguous, the output of the projection.
        heads: The operations on the heads before attention.
        caches: Keys and values, `(P, Z, K, D)` each; updated in place.
        step: One token per sequence.
        mask: Window, soft cap, slopes, sinks.
        arrived: Arrival counters, `(T * K,)` int32 zeros that nothing else uses meanwhile; modified.

    Returns:
        `(T, H D)` in the dtype of `qkv`.
    """
    cos, sin = heads.rope or (None, None)
    (keys, k_scales), (values, v_scales) = parts_of(caches[0]), parts_of(caches[1])
    return _attend_step(  # type: ignore[no-any-return]
        qkv,
        [cos, sin, *heads.gains, mask.alibi, mask.sinks],
        [keys, values, k_scales, v_scales],
        [step.kv_lens, step.block_table, step.slots],
        arrived,
        [mask.scale, mask.softcap or 0.0, heads.eps, heads.offset, heads.clip],
        [heads.heads, heads.kv_heads, heads.dim, int(heads.interleaved), heads.norm, mask.window or 0],
    )


def build_of(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    int8: bool = False,
    norm: bool = False,
    all_of_it: bool = False,
    number: int = 80,
) -> Build:
    """Return the build for some heads, optionally with norms of queries and keys, or with every option."""
    types = dict.fromkeys(("qkv", "q_gain", "k_gain", "out"), "*bf16")
    types |= dict.fromkeys(("k_cache", "v_cache"), "*i8" if int8 else "*bf16")
    types |= dict.fromkeys(
        ("cos", "sin", "k_scales", "v_scales", "part", "weight", "alibi", "sinks"), "*fp32"
    )
    types |= dict.fromkeys(("arrived", "kv_lens", "block_table"), "*i32") | {"slots": "*i64"}
    types |= dict.fromkeys(("scale", "softcap", "eps", "offset", "clip"), "fp32")
    types |= dict.fromkeys(("window", "table_width", "angle_row", "angle_step"), "i32")
    names = ("HAS_CLIP", "HAS_ALIBI", "HAS_SINKS", "HAS_SOFTCAP", "HAS_WINDOW", "OWN_GAINS", "INTERLEAVED")
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "SIZE": 32, "HALF": dim // 2, "SPLITS": 16}
    constants["OVERLAPS"] = overlaps(number)
    constants |= dict.fromkeys(names, int(all_of_it)) | {
        "INT8": int8,
        "Q_NORM": int(norm),
        "K_NORM": int(norm),
    }
    bucket, launch = decode_form("decode step", heads // kv_heads, dim, 2, int8)
    return Build(
        f"attention of a decode step, {heads}/{kv_heads} heads of {dim}"
        f"{', int8' if int8 else ''}{', q/k norm' if norm else ''}{', every option' if all_of_it else ''}"
        f", sm_{number}",
        _attend_one,
        types | constants,
        launch,
        wide_loads=2,
        needs=("HMMA",),
        targets=("sm_90",) if number >= 90 else ("sm_80", "gfx942"),
        bucket=bucket,
    )


BUILDS = tuple(
    build_of(*shape, number=number, **options)
    for number in (80, 90)
    for shape, options in (
        ((32, 8, 128), {}),
        ((32, 8, 128), {"int8": True}),
        ((32, 8, 64), {"norm": True}),
        ((12, 12, 96), {"all_of_it": True}),
    )
)
