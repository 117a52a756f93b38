"""Prompts captured as graphs: the tokens of one sequence, padded to one of a few sizes.

A prompt of some hundred tokens keeps a GPU busy for a fraction of the time that the host needs to launch it.
The padding behind its tokens is a second sequence, which writes into a scratch block.

A size is captured when it occurs for the second time: a capture takes as long as several prompts.

Shapes: T rows of a captured prompt, n tokens of the sequence, V vocabulary, W blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.model.block.paged_cache import BLOCK_SIZE
from slipstream.ops.step import Step

__all__ = ["MOST_TOKENS", "CapturedPrompt", "rows_of", "static_prompt"]

_ROWS = (32, 48, 80, 112, 144, 208, 272, 400, 528)
"""Rows of the captured prompts: slightly above round numbers of tokens, because one row must stay free."""

MOST_TOKENS = _ROWS[-1] - 1
"""Tokens of the longest prompt that is captured; for longer ones the GPU takes as long as the host."""


def rows_of(step: Step, width: int) -> int | None:
    """Return T for a step, or None if it is not a prompt of one sequence, or too long.

    Args:
        step: Any step.
        width: W.
    """
    tokens, wanted = step.token_ids.shape[0], step.logit_rows.shape[0]
    if step.kv_lens.shape[0] != 1 or tokens < 2 or wanted > 1:
        return None
    rows = next((rows for rows in _ROWS if rows > tokens), None)
    return rows if rows is not None and rows - tokens <= width * BLOCK_SIZE else None


def static_prompt(rows: int, width: int, scratch: int, device: torch.device) -> Step:
    """Return a step with static tensors, in which at first all but one token are padding.

    Args:
        rows: T.
        width: W.
        scratch: The cache block that padding writes to.
        device: The device that the step runs on.
    """

    def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return Step(
        token_ids=full(rows),
        positions=full(rows),
        query_starts=torch.tensor([0, 1, rows], dtype=torch.int32, device=device),
        kv_lens=torch.tensor([1, rows - 1], dtype=torch.int32, device=device),
        block_table=full(2, width, value=scratch, dtype=torch.int32),
        slots=full(rows, value=scratch * BLOCK_SIZE),
        logit_rows=full(1),
        max_query_len=rows,
        max_kv_len=width * BLOCK_SIZE,
        static=True,
    )


@dataclass(frozen=True)
class CapturedPrompt:
    """A captured prompt of one size and one block table width.

    Attributes:
        step: The static tensors that the next replay reads.
        scratch: The cache block of the second sequence, which is padding.
        replay: Runs the step and returns its logits, `(1, V)`, always in the same memory.
    """

    step: Step
    scratch: int
    replay: Callable[[], Tensor]

    def logits(self, step: Step) -> Tensor:
        """Run a step for which `rows_of` gives this size; return logits `(R, V)` float32 in new memory."""
        into, tokens = self.step, step.token_ids.shape[0]
        rows, used = into.token_ids.shape[0], step.block_table.shape[1]
        for part in ("token_ids", "positions", "slots"):
            getattr(into, part)[:tokens].copy_(getattr(step, part))
        into.token_ids[tokens:].zero_()
        into.positions[tokens:].zero_()
        into.slots[tokens:].fill_(self.scratch * BLOCK_SIZE)
        into.query_starts[1:2].fill_(tokens)
        into.kv_lens[:1].copy_(step.kv_lens)
        into.kv_lens[1:].fill_(rows - tokens)
        into.block_table[0, :used].copy_(step.block_table[0])
        into.block_table[0, used:].fill_(self.scratch)
        if step.logit_rows.shape[0]:
            into.logit_rows.copy_(step.logit_rows)
        return self.replay()[: step.logit_rows.shape[0]].to(torch.float32, copy=True)
