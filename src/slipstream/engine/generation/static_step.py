"""A decode step in static tensors, which a graph reads and updates.

Shapes: B rows, W blocks per sequence, Z tokens per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.model.block.paged_cache import BLOCK_SIZE
from slipstream.ops.next_step import Following
from slipstream.ops.step import Step

__all__ = ["MOST_AHEAD", "blocks_of", "least_blocks", "static_step"]

MOST_AHEAD = 64
"""Maximum number of steps that are replayed before the host reads their tokens."""


def least_blocks(tokens: int) -> int:
    """Return the number of blocks that `tokens` tokens need."""
    return -(-tokens // BLOCK_SIZE)


def blocks_of(tokens: int) -> int:
    """Return the blocks per sequence, rounded up to a power of two so that there are few widths."""
    return 1 << (least_blocks(tokens) - 1).bit_length()


def static_step(rows: int, width: int, scratch: int, device: torch.device) -> tuple[Step, Following]:
    """Return a decode step in static tensors, and what an op needs to turn it into the next step."""

    def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    step = Step(
        token_ids=full(rows),
        positions=full(rows),
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lens=full(rows, value=1, dtype=torch.int32),
        block_table=full(rows, width, value=scratch, dtype=torch.int32),
        slots=full(rows, value=scratch * BLOCK_SIZE),
        logit_rows=torch.arange(rows, device=device),
        max_query_len=1,
        max_kv_len=width * BLOCK_SIZE,
    )
    own = (step.token_ids, step.positions, step.kv_lens, step.slots, step.block_table)
    arrived = full(rows, dtype=torch.int32)
    return step, Following(full(rows, MOST_AHEAD), full(rows), *own, arrived, BLOCK_SIZE)
