"""The choice of the next token from scores to which all logits processors have been applied.

Shapes: N sequences, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.ops.bind import Case, Op
from slipstream.ops.next_step import Following

__all__ = ["OP", "sample"]


def sample(scores: Tensor, *, greedy: bool, following: Following | None = None) -> Tensor:
    """Return the best token of each row, or one drawn from `softmax(scores)` with torch's default generator.

    Args:
        scores: `(N, V)` float32, or logits in a model's own dtype; `-inf` for tokens that must not be chosen.
        greedy: Take the best token, the one with the lowest index among equals.
        following: Receives the tokens for the next step.

    Returns:
        `(N,)` int64.
    """
    if greedy:
        chosen = scores.argmax(dim=-1)
    else:
        chosen = torch.multinomial(scores.float().softmax(-1), num_samples=1).squeeze(1)
    if following is not None:
        following.take(chosen)
    return chosen


def _case(name: str, rows: int, vocabulary: int) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        return {"scores": 3 * torch.randn(rows, vocabulary, generator=generator), "greedy": True}

    return Case(name, make)


OP = Op("sample", sample, (_case("one row", 1, 1009), _case("a batch", 5, 257), _case("one token", 2, 1)))
