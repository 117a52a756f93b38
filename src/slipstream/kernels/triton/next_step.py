"""`ops.next_step.Following.take` for one row, at the end of a kernel that chose the row's token."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["FOLLOWING", "follow", "given_following"]


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def follow(
    row, token, tokens, counts, token_ids, positions, kv_lens, slots, block_table, ahead, width,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Prepare the next step of one row; only one program per row may do so."""
    count = tl.load(counts + row)
    tl.store(tokens + row * ahead + count, token)
    tl.store(counts + row, count + 1)
    tl.store(token_ids + row, token)
    position = tl.load(positions + row) + 1
    tl.store(positions + row, position)
    tl.store(kv_lens + row, tl.load(kv_lens + row) + 1)
    place = tl.minimum(position // SIZE, width - 1)
    block = tl.load(block_table + row * width + place).to(tl.int64)
    tl.store(slots + row, block * SIZE + position % SIZE)


def given_following(
    following: list[Tensor], block_size: int, otherwise: Tensor
) -> tuple[list[Tensor], tuple[int, int], dict[str, Any]]:
    """Return the arguments of a launch for the next step: tensors, their sizes, and constants.

    Args:
        following: The result of `Following.tensors`, or empty for no next step.
        block_size: Tokens per cache block.
        otherwise: Placeholder for absent tensors; not read.
    """
    constants = {"FOLLOWS": bool(following), "SIZE": block_size}
    if not following:
        return [otherwise] * 8, (0, 0), constants
    return following, (following[0].shape[1], following[6].shape[1]), constants


FOLLOWING: dict[str, Any] = {
    **dict.fromkeys(("out", "tokens", "counts", "token_ids", "positions", "slots"), "*i64"),
    **dict.fromkeys(("kv_lens", "block_table", "arrived"), "*i32"),
    **dict.fromkeys(("vocabulary", "ahead", "width"), "i32"),
    "FOLLOWS": True,
    "SIZE": 32,
}
"""Types and constants of these arguments, for builds."""
