"""The penalty for repetitions: scores as transformers' processor leaves them."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from slipstream.engine.generation.processors import penalty_of
from slipstream.ops.penalty import Penalty


@pytest.mark.parametrize("factor", [1.3, 0.6, 1.0])
def test_scores_are_lowered_as_by_transformers(factor: float) -> None:
    """Also of a prompt with padding and with ids that have no scores, and of tokens added later."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 45, (3, 12), generator=generator)  # of a vocabulary of 40
    ids[1, :7] = 0
    theirs, penalty = RepetitionPenaltyLogitsProcessor(factor), Penalty(factor, ids[:, :8], 40)
    penalty.add(ids[:, 8:11])
    penalty.add(ids[:, 11:])
    scores = 4 * torch.randn(3, 40, generator=generator)
    scores[0, ids[0] % 40] = float("-inf")
    expected = theirs(ids, scores)
    assert torch.equal(penalty.of(range(3))(scores), expected)
    assert torch.equal(penalty.of([2, 0])(scores[[2, 0]]), expected[[2, 0]])
    assert factor == 1 or not torch.equal(expected, scores)


def test_ids_that_no_model_takes_are_left_to_the_model() -> None:
    assert Penalty(2.0, torch.tensor([[-3, 1]]), 4).seen.tolist() == [[False, True, False, False]]


def test_the_penalty_alone_is_read_from_processors() -> None:
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    assert penalty_of(LogitsProcessorList([penalty])) == 1.2

    class Own(RepetitionPenaltyLogitsProcessor):
        pass

    for others in (
        [],
        [penalty, penalty],
        [penalty, NoRepeatNGramLogitsProcessor(2)],
        [Own(1.2)],
        [RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)],
    ):
        assert penalty_of(LogitsProcessorList(others)) is None
