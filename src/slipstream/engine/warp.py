"""Reads transformers' processors: those that only warp at the end, and a penalty for repetitions before them.

Both are one operation with the draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from slipstream.ops.draw import Warp

__all__ = ["parted", "penalty_of", "warp_of"]


def parted(processors: Sequence[Any]) -> tuple[Sequence[Any], Warp]:
    """Part a list of processors into those that come first and what those at its end do, be it nothing.

    Args:
        processors: Of a generation, in order.

    Returns:
        As few as possible of the first, and the warp of the others.
    """
    first = 0
    while (warp := warp_of(processors[first:])) is None:
        first += 1
    return processors[:first], warp


def warp_of(processors: Iterable[Any]) -> Warp | None:
    """What a list of processors does to scores, or None where it does more than a `Warp` says.

    Args:
        processors: Of a generation, in order. Temperature, top k, top p and min p are known, each once, in
            this order, and leaving at least one token.
    """
    from transformers.generation import logits_process as known

    order = (
        (known.TemperatureLogitsWarper, "temperature"),
        (known.TopKLogitsWarper, "top_k"),
        (known.TopPLogitsWarper, "top_p"),
        (known.MinPLogitsWarper, "min_p"),
    )
    warp, next_one = Warp(), 0
    for processor in processors:
        place = next((i for i, (kind, _) in enumerate(order) if type(processor) is kind), -1)
        if place < next_one:
            return None
        own, name = vars(processor), order[place][1]
        if own.get("min_tokens_to_keep", 1) != 1 or own.get("filter_value", -float("inf")) != -float("inf"):
            return None
        warp, next_one = replace(warp, **{name: own[name]}), place + 1
    return warp


def penalty_of(processors: Sequence[Any]) -> float | None:
    """The factor of a penalty for repetitions, prompt included, or None where the list does anything else.

    Args:
        processors: Of a generation, without those at its end that only warp.
    """
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    if len(processors) != 1 or type(processors[0]) is not RepetitionPenaltyLogitsProcessor:
        return None
    own = vars(processors[0])
    # One from before there was such a choice does not have it.
    return None if own.get("prompt_ignore_length") is not None else float(own["penalty"])
