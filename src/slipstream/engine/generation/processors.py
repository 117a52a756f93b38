"""Recognizes transformers' processors: warpers at the end, a repetition penalty, suppressed tokens.

These can be applied in the same operation that chooses the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from slipstream.ops.draw import Warp
from slipstream.ops.suppression import Rule

__all__ = ["may_mix_rows", "parted", "penalty_of", "suppressions_of", "warp_of"]


def parted(processors: Sequence[Any]) -> tuple[Sequence[Any], Warp]:
    """Split a list of processors into a head and a tail of warpers, as long as possible, perhaps empty.

    Args:
        processors: The processors of a generation, in order.

    Returns:
        The head, and the `Warp` that the tail applies.
    """
    first = 0
    while (warp := warp_of(processors[first:])) is None:
        first += 1
    return processors[:first], warp


def warp_of(processors: Iterable[Any]) -> Warp | None:
    """Return the `Warp` that is equivalent to a list of processors, or None if there is none.

    Args:
        processors: Processors in order. Known are temperature, top k, top p and min p, each at most once, in
            this order, with `min_tokens_to_keep` 1.
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


def may_mix_rows(processors: Iterable[Any]) -> bool:
    """Whether a processor may read one row's scores for another's: transformers' own mostly do not.

    Processors for guidance do: their second half of rows is the unguided one.
    """
    kinds = [type(processor) for processor in processors]
    own = "transformers.generation.logits_process"
    return any(kind.__module__ != own or "Guidance" in kind.__name__ for kind in kinds)


def penalty_of(processors: Sequence[Any]) -> float | None:
    """Return the factor if the list is just a repetition penalty that counts the prompt; else None.

    Args:
        processors: The processors of a generation, without the warpers at the end.
    """
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    if len(processors) != 1 or type(processors[0]) is not RepetitionPenaltyLogitsProcessor:
        return None
    own = vars(processors[0])
    # In older transformers versions the processor has no such attribute.
    return None if own.get("prompt_ignore_length") is not None else float(own["penalty"])


def suppressions_of(processors: Sequence[Any], vocabulary: int) -> tuple[list[Any], list[Rule]]:
    """Separate processors that only suppress tokens from the others.

    Args:
        processors: The processors of a generation, without the warpers at the end.
        vocabulary: Size of the vocabulary; ids beyond it are left to transformers' own code.

    Returns:
        The other processors, and the rules of the suppressing ones, both in order. A repetition penalty may
        stand before or after these: it does not change what is suppressed.
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
    """Return the suppression rule that is equivalent to a processor, or None if there is none."""
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
        # Several end tokens all get the same score in transformers, which a `Rule` does not express.
        rule = Rule(ids, last, last + 1, only=True) if len(ids) == 1 else None
    elif kind is known.NoBadWordsLogitsProcessor:
        words = own["sequence_bias"]
        # Longer words depend on the tokens before.
        known_ones = all(len(ids) == 1 and ids[0] < vocabulary for ids in words)
        rule = Rule(tuple(ids[0] for ids in words)) if known_ones else None
    return rule


def _ids(tokens: Any) -> tuple[int, ...]:
    return tuple(tokens.flatten().tolist())
