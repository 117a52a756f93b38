"""Steps of one token per sequence.

Shapes: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.model.block.paged_cache import BLOCK_SIZE
from slipstream.ops.step import Step

__all__ = ["Decode"]


class Decode:
    """Makes steps of one token per sequence; all steps share the same tensors, updated in place."""

    def __init__(
        self,
        rows: list[int],
        positions: Sequence[int],
        blocks: Sequence[Sequence[int]],
        device: torch.device,
        shifts: Sequence[int] = (),
    ) -> None:
        """Allocate the tensors for the first step.

        Args:
            rows: The sequences' rows in the batch.
            positions: For each sequence, the position of its token in the first step.
            blocks: For each sequence, its cache blocks in order.
            device: The device that the steps run on.
            shifts: For each sequence, what is added to its position for the rotary angles; empty for none.
        """
        count = len(rows)
        self.rows = rows
        self._source = torch.tensor(rows, device=device)
        self._states = self._source.int()
        self._within = torch.arange(BLOCK_SIZE, device=device)
        self.place(blocks)
        self._places = torch.tensor(positions, device=device) - 1
        self._lens = self._places.int() + 1
        self._ids = torch.empty(count, dtype=torch.int64, device=device)
        self._slots = torch.empty(count, 1, dtype=torch.int64, device=device)
        self._flat_slots = self._slots.view(-1)
        self._column = self._places.view(-1, 1)
        # Without shifts this is the same tensor as `_places`.
        self._positions = self._places + torch.tensor(shifts, device=device) if any(shifts) else self._places
        self._beyond = max(0, *shifts) if any(shifts) else 0
        self._starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(count, device=device)
        self._first, self._longest = positions[0] - 1, max(positions)

    def place(self, blocks: Sequence[Sequence[int]]) -> None:
        """Set the cache blocks of each sequence, in order."""
        width = max(map(len, blocks))
        table = [[*ids, *[0] * (width - len(ids))] for ids in blocks]
        self._table = torch.tensor(table, dtype=torch.int32, device=self._source.device)
        self._all_slots = (self._table.long()[:, :, None] * BLOCK_SIZE + self._within).flatten(1)

    def step(self, tokens: Tensor, first: int) -> Step:
        """Return the next step, which runs `tokens[rows]`; the following call overwrites its tensors.

        Args:
            tokens: The batch's latest tokens, `(B,)`.
            first: Position of the first sequence's token.
        """
        torch.index_select(tokens, 0, self._source, out=self._ids)
        further, self._first = first - self._first, first
        self._places.add_(further)
        if self._positions is not self._places:
            self._positions.add_(further)
        self._lens.add_(further)
        torch.gather(self._all_slots, 1, self._column, out=self._slots)
        self._longest += further
        return Step(
            token_ids=self._ids,
            positions=self._positions,
            query_starts=self._starts,
            kv_lens=self._lens,
            block_table=self._table,
            slots=self._flat_slots,
            logit_rows=self._logit_rows,
            max_query_len=1,
            max_kv_len=self._longest,
            beyond=self._beyond,
            states=self._states,
        )
