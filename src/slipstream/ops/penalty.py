"""The repetition penalty: lowers the scores of tokens that already occur in a sequence.

Shapes: B batch, L tokens of a row so far, R some rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Penalty", "RowPenalty"]


class Penalty:
    """The penalty of a batch: scores of seen tokens are divided by it, or multiplied if they are below 0.

    Source: Keskar et al. 2019 (arXiv 1909.05858), section 4.1; transformers,
    generation/logits_process.py, for scores below 0 and for the prompt, which counts, padding included.

    Attributes:
        factor: Above 0; 1 for none.
        seen: `(B, V)` bool, changed as tokens are added.
    """

    def __init__(self, factor: float, ids: Tensor, vocabulary: int) -> None:
        """Begin with a prompt.

        Args:
            factor: Above 0.
            ids: `(B, L)` int64; ids outside of the vocabulary are ignored.
            vocabulary: V.
        """
        self.factor = factor
        self.seen = torch.zeros(ids.shape[0], vocabulary, dtype=torch.bool, device=ids.device)
        self.add(ids)

    def add(self, tokens: Tensor) -> None:
        """Mark further tokens, `(B, n)`, as seen."""
        last = self.seen.shape[1] - 1
        known = ((tokens >= 0) & (tokens <= last)).to(torch.uint8)
        self.seen.view(torch.uint8).scatter_reduce_(1, tokens.clamp(0, last), known, "amax")

    def of(self, rows: Sequence[int]) -> RowPenalty:
        """Return the penalty of some of the rows."""
        return RowPenalty(self, rows)


class RowPenalty:
    """The penalty of some rows of a batch.

    Attributes:
        whole: The penalty of the whole batch.
        rows: Indices of the rows (R).
    """

    def __init__(self, whole: Penalty, rows: Sequence[int]) -> None:
        """Select rows of a batch's penalty."""
        self.whole, self.rows = whole, rows

    @property
    def batch(self) -> int:
        """The number of rows of the batch (B)."""
        return self.whole.seen.shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether the rows are all rows of the batch, in order."""
        return len(self.rows) == self.batch

    def __call__(self, scores: Tensor) -> Tensor:
        """Return scores `(R, V)` float32 with those of seen tokens lowered."""
        seen, factor = self.whole.seen, self.whole.factor
        lowered = torch.where(scores < 0, scores * factor, scores / factor)
        return torch.where(seen if self.is_whole else seen[list(self.rows)], lowered, scores)
