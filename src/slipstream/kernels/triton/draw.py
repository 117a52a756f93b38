"""`draw` on the GPU, without sorting the vocabulary: one program per row, all in one launch.

The least score that may be drawn is found by bisection: how many scores (or which share of the probability)
are at or above a pivot decides which half it is in, and the bounds move on to the next existing score, so
that every round leaves fewer candidates. Once few enough are left they are kept in registers, and the
following rounds read nothing from memory. Raw scores are compared, since division by a temperature keeps
their order.

Source: the pivots as in FlashInfer's sampling (Ye et al. 2025, arXiv 2501.01005); `ops.draw` for the rest.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.attention_tile import LOG2E
from slipstream.kernels.triton.next_step import FOLLOWING, follow, given_following
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Bucket, Build, Launch, generation, interpreted, refuse
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.next_step import Following
from slipstream.ops.noise import exponential

__all__ = ["BUILDS", "KERNELS"]


@triton.jit
def _scores_at(scores, begin, vocabulary, BLOCK: tl.constexpr):
    """Load some scores, `-inf` beyond the last."""
    at = begin + tl.arange(0, BLOCK)
    return tl.load(scores + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _extent(scores, vocabulary, BLOCK: tl.constexpr):
    """Return the least and the largest score that is not hidden, and the number of such scores."""
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocabulary, BLOCK):
        x = _scores_at(scores, begin, vocabulary, BLOCK)
        real = x > float("-inf")
        least = tl.minimum(least, tl.where(real, x, float("inf")))
        most = tl.maximum(most, x)
        count += real.to(tl.int32)
    return tl.min(least, 0), tl.max(most, 0), tl.sum(count, 0)


@triton.jit
def _beside(scores, vocabulary, pivot, top, scale, BLOCK: tl.constexpr):
    """Return count, sum of chances and least of the scores at or above a pivot, and the largest below it.

    A chance is relative to that of the best score, which is 1.
    """
    count = tl.zeros([BLOCK], tl.int32)
    chances = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    below = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        x = _scores_at(scores, begin, vocabulary, BLOCK)
        above = x >= pivot
        count += above.to(tl.int32)
        chances += tl.where(above, tl.exp2((x - top) * scale), 0.0)
        least = tl.minimum(least, tl.where(above, x, float("inf")))
        below = tl.maximum(below, tl.where(above, float("-inf"), x))
    return tl.sum(count, 0), tl.sum(chances, 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _between(low, high):
    """Return a pivot above `low` and at most `high`."""
    middle = low * 0.5 + high * 0.5
    return tl.where(middle > low, middle, high)


@triton.jit
def _narrowed(scores, vocabulary, low, high, top, scale, most, wanted, count, until, BLOCK: tl.constexpr):
    """Raise `low` as long as `most` scores, and `wanted` of the chances, are at or above it.

    This ends early once at most `until` scores are left.
    """
    while (low < high) & (count > until):
        pivot = _between(low, high)
        above, chances, least, below = _beside(scores, vocabulary, pivot, top, scale, BLOCK)
        enough = (above >= most) & (chances >= wanted)
        low = tl.where(enough, least, low)
        count = tl.where(enough, above, count)
        high = tl.where(enough, high, below)
    return low, count


@triton.jit
def _gathered(scores, few, low, vocabulary, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Gather the scores at or above `low`, at most `KEPT`, into registers; `-inf` fills the rest."""
    count = tl.zeros([], tl.int32)
    for begin in range(0, vocabulary, BLOCK):
        x = _scores_at(scores, begin, vocabulary, BLOCK)
        taken = x >= low
        place = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(few + place, x, mask=taken)
        count += tl.sum(taken.to(tl.int32), 0)
    # Stores of the program's other threads are visible once all of them have reached the barrier.
    tl.debug_barrier()
    at = tl.arange(0, KEPT)
    return tl.load(few + at, mask=at < count, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _narrowed_of(x, weight, low, high, wanted):
    """Return the largest of some scores such that at least `wanted` of the weights are at or above it."""
    while low < high:
        pivot = _between(low, high)
        above = x >= pivot
        enough = tl.sum(tl.where(above, weight, 0.0), 0) >= wanted
        least = tl.min(tl.where(above, x, float("inf")), 0)
        below = tl.max(tl.where(above, float("-inf"), x), 0)
        low = tl.where(enough, least, low)
        high = tl.where(enough, high, below)
    return low


@triton.jit
def _bound(scores, few, vocabulary, scale, most, rest, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least score that remains after top-k (`most`) and the nucleus, and the best score.

    The nucleus is a share of the chances of the top k, so these are found first.
    """
    low, top, count = _extent(scores, vocabulary, BLOCK)
    share = 1.0 - tl.maximum(rest, 0.0)
    nucleus = rest >= 0
    if most < vocabulary:
        until = tl.where(most <= KEPT, KEPT, 0)
        low, count = _narrowed(scores, vocabulary, low, top, top, scale, most, 0.0, count, until, BLOCK)
        if count <= KEPT:
            x = _gathered(scores, few, low, vocabulary, KEPT, BLOCK)
            low = _narrowed_of(x, tl.full([KEPT], 1.0, tl.float32), low, top, most)
            if nucleus:
                chances = tl.exp2((x - top) * scale)
                wanted = tl.sum(tl.where(x >= low, chances, 0.0), 0) * share
                low = _narrowed_of(x, chances, low, top, wanted)
            nucleus = rest > 1.0  # always false: the nucleus has been applied
    if nucleus:
        found, left, least, below = _beside(scores, vocabulary, low, top, scale, BLOCK)
        wanted = left * share
        low, count = _narrowed(scores, vocabulary, low, top, top, scale, 0.0, wanted, found, KEPT, BLOCK)
        if count <= KEPT:
            x = _gathered(scores, few, low, vocabulary, KEPT, BLOCK)
            low = _narrowed_of(x, tl.exp2((x - top) * scale), low, top, wanted)
    return low, top


@triton.jit
def _draw_row(
    scores, noise, numbers, few, out,
    tokens, counts, token_ids, positions, kv_lens, slots, block_table,
    vocabulary, ahead, width,
    FOLLOWS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * vocabulary
    noise += row * vocabulary
    scale = LOG2E / tl.load(numbers)
    most = tl.load(numbers + 1)
    floor = tl.load(numbers + 3)
    low, top = _bound(scores, few + row * KEPT, vocabulary, scale, most, tl.load(numbers + 2), KEPT, BLOCK)
    best = tl.full([BLOCK], -1.0, tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocabulary, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = _scores_at(scores, begin, vocabulary, BLOCK)
        chance = tl.exp2((x - top) * scale)
        kept = (x >= low) & (chance >= floor) & (x > float("-inf"))
        value = tl.where(kept, chance / tl.load(noise + at, mask=kept, other=1.0), -1.0)
        place = tl.where(value > best, at, place)
        best = tl.maximum(best, value)
    first = tl.min(tl.where(best == tl.max(best, 0), place, vocabulary), 0)
    tl.store(out + row, first.to(tl.int64))
    if FOLLOWS:
        follow(
            row, first.to(tl.int64), tokens, counts, token_ids, positions, kv_lens, slots, block_table,
            ahead, width, SIZE,
        )  # fmt: skip


_DRAW = Launch({"KEPT": 2048, "BLOCK": 4096}, warps=8)
_SMALL = Launch({"KEPT": 64, "BLOCK": 128})
"""For interpreted kernels: a vocabulary of hundreds then takes the code paths of a large one."""
_DRAW_BUCKET = Bucket("draw", "any", {"BLOCK": (2048, 4096, 8192)}, warps=(4, 8, 16))


def _launch(
    scores: Tensor, noise: Tensor, numbers: Tensor, following: list[Tensor], block_size: int
) -> Tensor:
    rows, vocabulary = scores.shape
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        rule = _SMALL if interpreted() else _DRAW
        launch = launched(_DRAW_BUCKET, rule, generation(scores.device))
        few = scores.new_empty(rows, launch.sizes["KEPT"], dtype=torch.float32)
        tensors, sizes, constants = given_following(following, block_size, out)
        _draw_row[(rows,)](
            *(scores.contiguous(), noise.contiguous(), numbers, few, out),
            *tensors[:-1],
            *(vocabulary, *sizes),
            **constants,
            **launch.options(),
        )
    return out


_draw = operator(
    "draw(Tensor scores, Tensor noise, Tensor numbers, Tensor(a!)[] following, int block_size) -> Tensor",
    _launch,
    lambda scores, *rest: scores.new_empty(scores.shape[0], dtype=torch.int64),
)


def _run(
    scores: Tensor, noise: Tensor | None, numbers: Tensor, *, following: Following | None = None
) -> Tensor:
    if noise is None:
        noise = exponential(scores.shape, scores.device)
    if following is None:
        return _draw(scores, noise, numbers, [], 1)  # type: ignore[no-any-return]
    return _draw(scores, noise, numbers, following.tensors(), following.block_size)  # type: ignore[no-any-return]


def _refuse(facts: Facts) -> str | None:
    # Scores are float32, or logits in the dtype of the model.
    return refuse(facts, dtypes=(torch.float32, torch.bfloat16, torch.float16))


KERNELS = (Kernel("draw", "triton", "cuda", _refuse, _run),)

BUILDS = (
    Build(
        "draw, one of a vocabulary",
        _draw_row,
        {**FOLLOWING, "scores": "*bf16", "noise": "*fp32", "numbers": "*fp32", "few": "*fp32"},
        _DRAW,
        frozenset({"vocabulary"}),
        wide_loads=4,
        bucket=_DRAW_BUCKET,
    ),
)
