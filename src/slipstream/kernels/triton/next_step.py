"""The end of a decode step inside of a kernel that chose a token: what `ops.following` says, for one row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["FOLLOWING", "follow", "given_following"]


# The arguments of a launch are what the host hands over, in registers that the driver fills; one each.
@triton.jit
def follow(
    row, token, tokens, counts, token_ids, positions, kv_lens, slots, block_table, ahead, width,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Make the next step of one row; the program that does is the only one of the row that does."""
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
    """What a launch is given: tensors, their sizes, and constants.

    Args:
        following: Of `Following.tensors`, or none.
        block_size: Tokens per cache block.
        otherwise: Stands for the tensors that are not there, and is not read.
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
"""Types of these arguments, for builds."""
