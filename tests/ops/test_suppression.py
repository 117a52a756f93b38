"""Suppressed tokens: those that transformers' processors hide at each length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as known

from slipstream.engine.generation.processors import suppressions_of
from slipstream.ops.suppression import FOREVER, Rule, Suppression

VOCABULARY, CPU = 12, torch.device("cpu")

LISTS: dict[str, list[Any]] = {
    "min length": [known.MinLengthLogitsProcessor(4, [2, 30])],
    "min new tokens": [known.MinNewTokensLengthLogitsProcessor(3, 2, torch.tensor([2, 1]))],
    "suppressed": [known.SuppressTokensLogitsProcessor([5, 3, 5, 40])],
    "suppressed first": [known.SuppressTokensAtBeginLogitsProcessor([7, 0], 4)],
    "bad words": [known.NoBadWordsLogitsProcessor([[9], [2], [4]], 2)],
    "forced begin": [known.ForcedBOSTokenLogitsProcessor(4)],
    "forced end": [known.ForcedEOSTokenLogitsProcessor(6, 11)],
    "nothing": [known.MinLengthLogitsProcessor(0, 2)],
    "several": [
        known.MinLengthLogitsProcessor(5, 2),
        known.MinNewTokensLengthLogitsProcessor(1, 2, 3),
        known.SuppressTokensLogitsProcessor([5, 3]),
        known.SuppressTokensAtBeginLogitsProcessor([2, 6], 6),
    ],
    "forced, though suppressed before": [
        known.MinLengthLogitsProcessor(9, 2),
        known.ForcedEOSTokenLogitsProcessor(6, 2),
    ],
    "suppressed beside what is forced": [
        known.ForcedEOSTokenLogitsProcessor(6, 2),
        known.SuppressTokensLogitsProcessor([5, 3]),
    ],
}


@pytest.mark.parametrize("name", LISTS)
def test_tokens_are_hidden_as_by_transformers(name: str) -> None:
    others, rules = suppressions_of(LISTS[name], VOCABULARY)
    assert not others and len(rules) == len(LISTS[name])
    suppression = Suppression(rules, VOCABULARY, CPU)
    assert not suppression.is_total
    before = None, 0
    for length in range(1, 12):
        scores = torch.randn(2, VOCABULARY)
        expected = known.LogitsProcessorList(LISTS[name])(torch.ones(2, length, dtype=torch.long), scores)
        tokens, end = suppression.at(length)
        hidden = [] if tokens is None else tokens.tolist()
        assert (expected[0] == -torch.inf).nonzero().flatten().tolist() == hidden
        assert end > length
        if length < before[1]:
            assert tokens is before[0] and end == before[1]
        before = tokens, end
    assert end == FOREVER


@pytest.mark.parametrize(
    "processor",
    [
        known.NoBadWordsLogitsProcessor([[9], [2, 4]]),
        known.ForcedEOSTokenLogitsProcessor(6, [2, 3]),
        known.NoRepeatNGramLogitsProcessor(2),
        known.SequenceBiasLogitsProcessor([[[3], -float("inf")]]),
        type("Own", (known.SuppressTokensLogitsProcessor,), {})([3]),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_what_does_anything_else_is_left_to_transformers(processor: Any) -> None:
    suppressed = known.SuppressTokensLogitsProcessor([3])
    assert suppressions_of([processor, suppressed], VOCABULARY) == ([processor], [Rule((3,))])


def test_rules_that_leave_nothing_say_so() -> None:
    everything = Rule(tuple(range(VOCABULARY)), 3, 4)
    assert Suppression([everything], VOCABULARY, CPU).is_total
    assert not Suppression([everything, Rule((2,), only=True)], VOCABULARY, CPU).is_total
    assert Suppression([Rule((2,), only=True), Rule((2,))], VOCABULARY, CPU).is_total
