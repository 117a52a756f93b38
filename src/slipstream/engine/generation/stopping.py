"""When rows of a generation end.

Shapes: B batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.engine.generation.batch import Batch

__all__ = ["Stop"]


class Stop:
    """Evaluates stopping criteria; maximum length and end tokens are checked without calling them.

    Attributes:
        is_known: Whether there are only criteria of those two kinds.
        ends: The end tokens of all end-token criteria.
    """

    def __init__(self, criteria: Any) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

        self._criteria = criteria
        self._most: int | None = None
        self.is_known, ends = True, []
        for one in criteria:
            if type(one) is EosTokenCriteria:
                ends += one.eos_token_id.flatten().tolist()
            elif type(one) is MaxLengthCriteria and not _reminds(one):
                self._most = one.max_length if self._most is None else min(self._most, one.max_length)
            else:
                self.is_known = False
        self.ends: tuple[int, ...] = tuple(ends)

    def __call__(self, batch: Batch, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Return which rows are done, `tokens` `(B,)` being the batch's last tokens."""
        if not self.is_known:
            done: list[bool] = batch.shown(lambda ids: self._criteria(ids, scores)).tolist()
            return done
        if self._most is not None and batch.length >= self._most:
            return [True] * tokens.shape[0]
        return [token in self.ends for token in tokens.tolist()] if self.ends else [False] * len(tokens)


def _reminds(criterion: Any) -> bool:
    """Whether transformers' length criterion would warn that a generation exceeds the model's length."""
    most = criterion.max_position_embeddings
    return most is not None and criterion.max_length > most
