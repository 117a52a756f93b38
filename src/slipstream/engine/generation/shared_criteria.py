"""Stopping criteria on several ranks: what ends a sequence on one of them ends it on all.

Shapes: B batch, L tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.parallel import Axis
from slipstream.parallel.agree import any_of

__all__ = ["share_criteria"]

_OF_TOKENS = ("MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria")
"""Transformers' criteria that see tokens only, and so decide alike on all ranks."""


def share_criteria(kwargs: dict[str, Any], config: Any, ranks: Axis) -> dict[str, Any]:
    """Return a call's arguments with criteria that all ranks evaluate together.

    Transformers' own loops evaluate criteria on each rank alone. A rank whose clock or user ends a generation
    one step before the others would leave them waiting.

    Args:
        kwargs: The arguments of `generate` by name.
        config: The complete generation config.
        ranks: The ranks that run this call.
    """
    from transformers.generation import stopping_criteria as known

    given = list(kwargs.get("stopping_criteria") or ())
    if config.max_time is not None:
        if not any(type(one) is known.MaxTimeCriteria for one in given):
            given.append(known.MaxTimeCriteria(config.max_time))
        kwargs = {**kwargs, "max_time": float("inf")}  # None would leave the model's own limit in place
    if not given:
        return kwargs
    alike = tuple(getattr(known, name) for name in _OF_TOKENS)
    shared = [one if type(one) in alike else _Shared(one, ranks) for one in given]
    return {**kwargs, "stopping_criteria": known.StoppingCriteriaList(shared)}


class _Shared:
    """A criterion that holds for a row if it holds on any rank."""

    def __init__(self, criterion: Callable[..., Any], ranks: Axis) -> None:
        self._criterion, self._ranks = criterion, ranks

    def __call__(self, ids: Tensor, scores: Any, **more: Any) -> Tensor:
        """Return which rows of `(B, L)` are done, `(B,)` bool."""
        own = torch.as_tensor(self._criterion(ids, scores, **more)).expand(len(ids))
        done = any_of(own.tolist(), self._ranks, known=False)
        return torch.tensor(done, device=ids.device)
