"""Sampling of the next token: temperature, top-k, top-p (nucleus), min-p (floor), then a random draw.

Shapes: N sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.ops.bind import Case, Op
from slipstream.ops.next_step import Following
from slipstream.ops.noise import exponential

__all__ = ["OP", "Warp", "draw"]


@dataclass(frozen=True)
class Warp:
    """Sampling parameters, applied in this order.

    Attributes:
        temperature: Divides the scores.
        top_k: Keep this many of the best tokens, and those whose scores equal the last of them; 0 for all.
        top_p: Of these, keep the smallest set of best tokens with this share of the probability; 1 for all.
        min_p: Of these, keep those with at least this share of the best token's probability; 0 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def numbers(self, vocabulary: int, device: torch.device) -> Tensor:
        """Return the argument `numbers` of `draw`, `(4,)` float32, which captured steps read anew."""
        k = min(self.top_k or vocabulary, vocabulary)
        rest = 1 - self.top_p if self.top_p < 1 else -1.0
        return torch.tensor([self.temperature, k, rest, self.min_p], device=device, dtype=torch.float32)


def draw(
    scores: Tensor, noise: Tensor | None, numbers: Tensor, *, following: Following | None = None
) -> Tensor:
    """Draw a token for each row from the tokens that the filters keep of `softmax(scores / temperature)`.

    With noise from torch's generator this equals `torch.multinomial` of one sample after transformers'
    warpers in their order: the same seed draws the same tokens.

    Source: transformers, generation/logits_process.py; Holtzman et al. 2020 (arXiv 1904.09751) for the
    nucleus; Nguyen et al. 2024 (arXiv 2407.01082) for the floor; Efraimidis and Spirakis 2006 for the draw by
    the largest `chance / noise`.

    Args:
        scores: `(N, V)` float32, or logits in a model's own dtype; `-inf` for tokens that must not be chosen.
        noise: `(N, V)` float32, independent and exponential with mean 1; None for the next noise of torch's
            default generator.
        numbers: `(4,)` float32, from `Warp.numbers`: temperature, k, `1 - p` (negative for no nucleus),
            floor.
        following: Receives the tokens for the next step.

    Returns:
        `(N,)` int64.
    """
    if noise is None:
        noise = exponential(scores.shape, scores.device)
    temperature, k, rest, floor = numbers.unbind()
    hidden = float("-inf")
    scores = scores.float() / temperature
    place = (scores.shape[-1] - k).long().expand(scores.shape[0], 1)
    scores = scores.masked_fill(scores < scores.sort(-1).values.gather(-1, place), hidden)
    ordered, index = scores.sort(-1)
    removed = ordered.softmax(-1).cumsum(-1) <= rest
    removed[:, -1:] = False
    scores = scores.masked_fill(removed.scatter(-1, index, removed), hidden)
    chances = scores.softmax(-1)
    scores = scores.masked_fill(chances < floor * chances.amax(-1, keepdim=True), hidden)
    chosen = (scores.softmax(-1) / noise).argmax(-1)
    if following is not None:
        following.take(chosen)
    return chosen


def _case(name: str, rows: int, vocabulary: int, warp: Warp, *, hide: int = 0, width: float = 3.0) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        scores = width * torch.randn(rows, vocabulary, generator=generator)
        hidden = torch.randperm(vocabulary, generator=generator)[:hide]
        scores[:, hidden] = float("-inf")
        noise = torch.empty(rows, vocabulary).exponential_(generator=generator)
        return {"scores": scores, "noise": noise, "numbers": warp.numbers(vocabulary, scores.device)}

    return Case(name, make)


OP = Op(
    "draw",
    draw,
    (
        _case("no limits", 2, 307, Warp(0.7)),
        _case("the best of all", 2, 257, Warp(1.0, top_k=1)),
        _case("the best fifty", 2, 500, Warp(0.8, top_k=50)),
        _case("the nucleus", 2, 500, Warp(1.3, top_p=0.9), hide=250),
        _case("fifty, nucleus and floor", 2, 401, Warp(0.6, top_k=50, top_p=0.95, min_p=0.02)),
        _case("a nucleus of hundreds", 1, 600, Warp(1.0, top_p=0.9), width=0.1),
        _case("the best three hundred", 1, 600, Warp(1.0, top_k=300, top_p=0.8), width=0.1),
        _case("one token", 2, 1, Warp(0.5, top_k=3, top_p=0.5)),
        _case("one that is not hidden", 2, 33, Warp(0.5, top_p=0.5), hide=32),
    ),
)
