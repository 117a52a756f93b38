"""Tokens that are drawn: which may be is what transformers' warpers leave, how often is by their chances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from slipstream.engine.generation.processors import parted, warp_of
from slipstream.ops.draw import Warp, draw

WARPS = [
    Warp(),
    Warp(0.7),
    Warp(1.0, top_k=1),
    Warp(1.7, top_k=13),
    Warp(1.0, top_p=0.0),
    Warp(1.0, top_p=0.3),
    Warp(0.5, top_p=0.95),
    Warp(1.0, top_k=500, top_p=0.01),
    Warp(1.3, top_k=40, top_p=0.8, min_p=0.05),
    Warp(1.0, min_p=1.0),
]


def processors(warp: Warp) -> Any:
    made: list[Any] = []
    if warp.temperature != 1:
        made.append(TemperatureLogitsWarper(warp.temperature))
    if warp.top_k:
        made.append(TopKLogitsWarper(warp.top_k))
    if warp.top_p < 1:
        made.append(TopPLogitsWarper(warp.top_p))
    if warp.min_p:
        made.append(MinPLogitsWarper(warp.min_p))
    return LogitsProcessorList(made)


def warped(scores: Tensor, warp: Warp) -> Tensor:
    result: Tensor = processors(warp)(torch.zeros(len(scores), 1, dtype=torch.long), scores)
    return result


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_exactly_what_the_warpers_leave_can_be_drawn(warp: Warp) -> None:
    vocabulary = 151
    scores = 3 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(5))
    left = warped(scores, warp).isfinite()[0]
    # In row i the noise favours token i above all others: it is drawn unless it may not be.
    noise = torch.ones(vocabulary, vocabulary).fill_diagonal_(1e-30)
    found = draw(scores.expand(vocabulary, -1), noise, warp.numbers(vocabulary, scores.device))
    assert torch.equal(found == torch.arange(vocabulary), left)


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_a_seed_means_the_same_as_to_multinomial(warp: Warp) -> None:
    scores = 3 * torch.randn(4, 97, generator=torch.Generator().manual_seed(6))
    torch.manual_seed(8)
    expected = torch.multinomial(warped(scores, warp).softmax(-1), 1)[:, 0]
    torch.manual_seed(8)
    noise = torch.empty(4, 97).exponential_()
    assert torch.equal(draw(scores, noise, warp.numbers(97, scores.device)), expected)


def test_tokens_come_as_often_as_their_chances_say() -> None:
    warp, draws = Warp(0.8, top_k=9, top_p=0.97), 20_000
    scores = 2 * torch.randn(1, 23, generator=torch.Generator().manual_seed(7))
    noise = torch.empty(draws, 23).exponential_(generator=torch.Generator().manual_seed(9))
    found = draw(scores.expand(draws, -1), noise, warp.numbers(23, scores.device))
    chances = warped(scores, warp).softmax(-1)[0]
    counts = torch.bincount(found, minlength=23)
    real = chances > 0
    assert not counts[~real].any()
    expected = draws * chances[real]
    distance = float(((counts[real] - expected) ** 2 / expected).sum())
    # A right sampler is as far off, with at most 8 degrees of freedom, one time in ten thousand.
    assert int(real.sum()) <= 9 and distance < 31.8


def test_processors_are_read_or_left_alone() -> None:
    for warp in WARPS:
        assert warp_of(processors(warp)) == warp
    odd = [
        [TypicalLogitsWarper(0.9)],
        [TopKLogitsWarper(5), TemperatureLogitsWarper(0.5)],
        [TopKLogitsWarper(5), TopKLogitsWarper(7)],
        [TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
        [TopKLogitsWarper(5, filter_value=-1e9)],
        [lambda ids, scores: scores],
    ]
    assert [warp_of(each) for each in odd] == [None] * len(odd)


def test_what_warps_at_the_end_is_parted_from_what_comes_before() -> None:
    penalty, typical = RepetitionPenaltyLogitsProcessor(1.2), TypicalLogitsWarper(0.9)
    for warp in WARPS:
        first, last = parted(LogitsProcessorList([penalty, *processors(warp)]))
        assert list(first) == [penalty] and last == warp
    hot, few, fewer = TemperatureLogitsWarper(0.5), TopKLogitsWarper(5), TopKLogitsWarper(3)
    assert parted(LogitsProcessorList([few, hot, fewer])) == ([few], Warp(0.5, top_k=3))
    assert parted(LogitsProcessorList([hot, typical])) == ([hot, typical], Warp())
    assert parted(LogitsProcessorList()) == ([], Warp())
