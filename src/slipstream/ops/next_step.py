"""The next decode step, prepared on the device: chosen tokens are written where that step reads them.

Shapes: N sequences, A steps ahead, W blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Following"]


@dataclass(frozen=True)
class Following:
    """Persistent tensors of a step of one token per sequence; `take` advances them to the next step.

    Attributes:
        tokens: `(N, A)` int64, the tokens chosen since `counts` was zero.
        counts: `(N,)` int64, the number of these tokens; below A.
        token_ids: `(N,)` int64.
        positions: `(N,)` int64.
        kv_lens: `(N,)` int32.
        slots: `(N,)` int64.
        block_table: `(N, W)` int32. A sequence that exceeds it stays in its last block.
        arrived: `(N,)` int32 zeros, which a kernel may use as counters and resets to zero.
        block_size: Tokens per cache block.
    """

    tokens: Tensor
    counts: Tensor
    token_ids: Tensor
    positions: Tensor
    kv_lens: Tensor
    slots: Tensor
    block_table: Tensor
    arrived: Tensor
    block_size: int

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of the attributes."""
        first = [self.tokens, self.counts, self.token_ids, self.positions, self.kv_lens]
        return [*first, self.slots, self.block_table, self.arrived]

    def take(self, chosen: Tensor) -> None:
        """Advance the tensors to the step that runs the chosen tokens, `(N,)` int64."""
        self.tokens.scatter_(1, self.counts[:, None], chosen[:, None])
        self.counts.add_(1)
        self.token_ids.copy_(chosen)
        self.positions.add_(1)
        self.kv_lens.add_(1)
        place = (self.positions // self.block_size).clamp(max=self.block_table.shape[1] - 1)
        block = torch.gather(self.block_table, 1, place[:, None])[:, 0]
        self.slots.copy_(block * self.block_size + self.positions % self.block_size)
