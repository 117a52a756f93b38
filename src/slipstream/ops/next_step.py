"""The step after a decode step: chosen tokens are put where the next step reads them, without the host.

Shapes: N sequences, A steps ahead, W blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Following"]


@dataclass(frozen=True)
class Following:
    """Tensors of a step of one token per sequence, which stay: `take` makes the next step of them.

    Attributes:
        tokens: `(N, A)` int64, what was chosen since `counts` was zero.
        counts: `(N,)` int64, how many those are; below A.
        token_ids: `(N,)` int64.
        positions: `(N,)` int64.
        kv_lens: `(N,)` int32.
        slots: `(N,)` int64.
        block_table: `(N, W)` int32. A sequence that goes beyond it stays in its last block.
        arrived: `(N,)` int32 zeros, which a kernel may count in and leaves as they were.
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
        """All of them, in the order above."""
        first = [self.tokens, self.counts, self.token_ids, self.positions, self.kv_lens]
        return [*first, self.slots, self.block_table, self.arrived]

    def take(self, chosen: Tensor) -> None:
        """Change them into those of the step that runs the tokens `(N,)` int64."""
        self.tokens.scatter_(1, self.counts[:, None], chosen[:, None])
        self.counts.add_(1)
        self.token_ids.copy_(chosen)
        self.positions.add_(1)
        self.kv_lens.add_(1)
        place = (self.positions // self.block_size).clamp(max=self.block_table.shape[1] - 1)
        block = torch.gather(self.block_table, 1, place[:, None])[:, 0]
        self.slots.copy_(block * self.block_size + self.positions % self.block_size)
