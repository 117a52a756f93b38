"""The choice of the next token from scores that every processor has already seen.

Shapes: N sequences, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.ops.bind import Case, Op

__all__ = ["OP", "sample"]


def sample(scores: Tensor, *, greedy: bool) -> Tensor:
    """Return the best token of each row, or one drawn from `softmax(scores)` with torch's default generator.

    Args:
        scores: `(N, V)` float32; `-inf` for tokens that must not be chosen.
        greedy: Take the best, lowest index first among equals.

    Returns:
        `(N,)` int64.
    """
    if greedy:
        return scores.argmax(dim=-1)
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)


def _case(name: str, rows: int, vocabulary: int) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        return {"scores": 3 * torch.randn(rows, vocabulary, generator=generator), "greedy": True}

    return Case(name, make)


OP = Op("sample", sample, (_case("one row", 1, 1009), _case("a batch", 5, 257), _case("one token", 2, 1)))
