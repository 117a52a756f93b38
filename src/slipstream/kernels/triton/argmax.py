"""Greedy `sample` on the GPU: several programs per row, the last of which chooses the token.

Each program takes a part of the vocabulary and stores the best token of it; the one that arrives last joins
these, prepares the step that follows, if any, and resets the counter of arrivals.

Shapes: N rows, V vocabulary, S parts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.next_step import FOLLOWING, follow, given_following
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import (
    Bucket,
    Build,
    Launch,
    generation,
    interpreted,
    processors,
    refuse,
)
from slipstream.ops.bind import Kernel
from slipstream.ops.next_step import Following
from slipstream.ops.sample import sample

__all__ = ["BUILDS", "KERNELS"]

_MOST_PARTS = 128


@triton.jit
def _best_of_part(scores, begin, end, BLOCK: tl.constexpr):
    """Return the best of some scores of a row, and the first index that has it."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = begin + lane
    for at in range(begin, end, BLOCK):
        x = tl.load(scores + at + lane, mask=at + lane < end, other=float("-inf")).to(tl.float32)
        place = tl.where(x > best, at + lane, place)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, place, 0x7FFFFFFF), 0)


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def _best(
    scores, values, places, out,
    tokens, counts, token_ids, positions, kv_lens, slots, block_table, arrived,
    vocabulary, share, ahead, width,
    FOLLOWS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * share
    end = tl.minimum(begin + share, vocabulary)
    top, first = _best_of_part(scores + row * vocabulary, begin, end, BLOCK)
    is_last = True
    if PARTS > 1:
        tl.store(values + row * PARTS + part, top)
        tl.store(places + row * PARTS + part, first)
        # All threads store before one of them counts the arrival, which releases the stores of all.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        if PARTS > 1:
            at = row * PARTS + tl.arange(0, PARTS)
            value = tl.load(values + at, cache_modifier=".cg")
            place = tl.load(places + at, cache_modifier=".cg")
            first = tl.min(tl.where(value == tl.max(value, 0), place, 0x7FFFFFFF), 0)
            tl.store(arrived + row, 0)
        # NaN scores have no best one; the index must stay within the vocabulary.
        token = tl.minimum(first, vocabulary - 1).to(tl.int64)
        tl.store(out + row, token)
        if FOLLOWS:
            follow(
                row, token, tokens, counts, token_ids, positions, kv_lens, slots, block_table,
                ahead, width, SIZE,
            )  # fmt: skip


_LAUNCH = Launch({"BLOCK": 1024}, warps=4)
_SMALL = Launch({"BLOCK": 64})
"""For interpreted kernels: a vocabulary of hundreds is then split into parts, too."""
_BUCKET = Bucket("best", "any", {"BLOCK": (512, 1024, 2048, 4096)}, warps=(2, 4, 8))


def _parts(rows: int, vocabulary: int, block: int, device: torch.device) -> int:
    """Return the number of parts, a power of two: a block each at least, a program per multiprocessor."""
    most = max(min(processors(device) // rows, -(-vocabulary // block), _MOST_PARTS), 1)
    return 1 << (most.bit_length() - 1)


def _launch(scores: Tensor, following: list[Tensor], block_size: int) -> Tensor:
    rows, vocabulary = scores.shape
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        launch = launched(_BUCKET, _SMALL if interpreted() else _LAUNCH, generation(scores.device))
        block = launch.sizes["BLOCK"]
        parts = _parts(rows, vocabulary, block, scores.device)
        values = scores.new_empty(rows, parts, dtype=torch.float32)
        places = out.new_empty(rows, parts, dtype=torch.int32)
        tensors, sizes, constants = given_following(following, block_size, out)
        if not following and parts > 1:
            tensors = [*tensors[:-1], places.new_zeros(rows)]
        _best[(rows, parts)](
            *(scores.contiguous(), values, places, out),
            *tensors,
            *(vocabulary, triton.cdiv(triton.cdiv(vocabulary, parts), block) * block, *sizes),
            PARTS=parts,
            **constants,
            **launch.options(),
        )
    return out


_best_token = operator(
    "best(Tensor scores, Tensor(a!)[] following, int block_size) -> Tensor",
    _launch,
    lambda scores, *rest: scores.new_empty(scores.shape[0], dtype=torch.int64),
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _run(scores: Tensor, *, greedy: bool, following: Following | None = None) -> Tensor:
    if not greedy or scores.dtype not in _DTYPES:
        return sample(scores, greedy=greedy, following=following)
    if following is None:
        return _best_token(scores, [], 1)  # type: ignore[no-any-return]
    return _best_token(scores, following.tensors(), following.block_size)  # type: ignore[no-any-return]


KERNELS = (Kernel("sample", "triton", "cuda", functools.partial(refuse, dtypes=_DTYPES), _run),)

BUILDS = (
    Build(
        "sample, the best of a vocabulary",
        _best,
        {**FOLLOWING, "scores": "*bf16", "values": "*fp32", "places": "*i32", "share": "i32", "PARTS": 64},
        _LAUNCH,
        frozenset({"vocabulary", "share"}),
        wide_loads=1,
        bucket=_BUCKET,
    ),
)
