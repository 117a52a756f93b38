"""Reads transformers' processors: those that only warp at the end, a penalty, tokens that are suppressed.

All of these are one operation with the choice of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from slipstream.ops.draw import Warp
from slipstream.ops.suppression import Rule

__all__ = ["parted", "penalty_of", "suppressions_of", "warp_of"]


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


def suppressions_of(processors: Sequence[Any], vocabulary: int) -> tuple[list[Any], list[Rule]]:
    """Part a list of processors into those that only say which tokens may not be chosen, and the others.

    Args:
        processors: Of a generation, without those at its end that only warp.
        vocabulary: Tokens that there are; transformers' own code says what it thinks of others.

    Returns:
        The others, and what the former say, both in order. A penalty among the others may come before or
        after: it does not change what is suppressed.
    """
    others, rules = list[Any](), list[Rule]()
    for processor in processors:
        rule = _rule_of(processor, vocabulary)
        if rule is None:
            others.append(processor)
        else:
            rules.append(rule)
    return others, rules


def _rule_of(processor: Any, vocabulary: int) -> Rule | None:
    """What a processor says, or None where it does anything else."""
    from transformers.generation import logits_process as known

    own, kind, rule = vars(processor), type(processor), None
    if kind is known.MinLengthLogitsProcessor:
        rule = Rule(_ids(own["eos_token_id"]), end=own["min_length"])
    elif kind is known.MinNewTokensLengthLogitsProcessor:
        rule = Rule(_ids(own["eos_token_id"]), end=own["prompt_length_to_skip"] + own["min_new_tokens"])
    elif kind is known.SuppressTokensLogitsProcessor:
        rule = Rule(_ids(own["suppress_tokens"]))
    elif kind is known.SuppressTokensAtBeginLogitsProcessor:
        begin = own["begin_index"]
        rule = Rule(_ids(own["begin_suppress_tokens"]), begin, begin + 1)
    elif kind is known.ForcedBOSTokenLogitsProcessor:
        rule = Rule((int(own["bos_token_id"]),), 1, 2, only=True)
    elif kind is known.ForcedEOSTokenLogitsProcessor:
        ids, last = _ids(own["eos_token_id"]), own["max_length"] - 1
        # Of several the first is said, whatever their scores.
        rule = Rule(ids, last, last + 1, only=True) if len(ids) == 1 else None
    elif kind is known.NoBadWordsLogitsProcessor:
        words = own["sequence_bias"]
        # Longer ones depend on what was said.
        known_ones = all(len(ids) == 1 and ids[0] < vocabulary for ids in words)
        rule = Rule(tuple(ids[0] for ids in words)) if known_ones else None
    return rule


def _ids(tokens: Any) -> tuple[int, ...]:
    return tuple(tokens.flatten().tolist())
