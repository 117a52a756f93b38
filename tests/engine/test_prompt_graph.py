"""Prompts captured on the device that records: the same logits at every length, and what is not captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.devices import NullDevice
from slipstream.engine.generation.graph import Graphs
from slipstream.engine.generation.prompt_graph import MOST_TOKENS
from tests.engine.test_graph import GENERATORS, GRAPHS
from tests.helpers.models import left_padded, pair, prompt

ONE = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Engines run on the null device; the rows of each prompt that is captured."""
    seen: list[int] = []
    capture = Graphs._capture_prompt

    def counted(self: Graphs, rows: int, width: int) -> Any:
        seen.append(rows)
        return capture(self, rows, width)

    monkeypatch.setattr("slipstream.engine.build.choose", NullDevice)
    monkeypatch.setattr(Graphs, "_capture_prompt", counted)
    yield seen


def agree(both: Any, ids: torch.Tensor, **options: Any) -> None:
    expected, got = (model.generate(ids, **ONE, **options) for model in (both.original, both.engine))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.scores[0], expected.scores[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", GENERATORS)
def test_captured_prompts_say_what_the_model_says(kind: str, prompts: list[int]) -> None:
    both = pair(kind, settings=GRAPHS)
    for length in (9, 5, 31, 2, 17):  # after a longer one, nothing of that may be left
        agree(both, prompt(1, length))
    assert prompts == [32]


def test_each_size_is_captured_when_it_is_met_again(prompts: list[int]) -> None:
    both = pair("llama", settings=GRAPHS)
    for length in (32, 47, 40, 79, 48, 5):
        agree(both, prompt(1, length))
    assert prompts == [48, 80]


def test_what_follows_a_captured_prompt_reads_its_keys(prompts: list[int]) -> None:
    both = pair("llama", settings=GRAPHS)
    for length in (12, 20, 7):
        ids = prompt(1, length)
        options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
        assert torch.equal(both.engine.generate(ids, **options), both.original.generate(ids, **options))
    found = []
    for model in (both.original, both.engine):
        torch.manual_seed(5)
        found.append(model.generate(prompt(1, 9), max_new_tokens=20, do_sample=True, top_k=30))
    assert torch.equal(found[0], found[1])
    assert prompts == [32]


def test_several_prompts_and_long_ones_are_not_captured(prompts: list[int]) -> None:
    both = pair("llama", settings={**GRAPHS, "max_out_tokens": 2 * MOST_TOKENS})
    (ids, mask) = left_padded(3, 9)
    for _ in range(2):
        agree(both, ids, attention_mask=mask)
        agree(both, prompt(1, MOST_TOKENS + 1))
    assert prompts == []
    for _ in range(2):
        agree(both, prompt(1, MOST_TOKENS))
    assert prompts == [MOST_TOKENS + 1]


def test_new_weights_and_a_larger_cache_are_heard(prompts: list[int]) -> None:
    both = pair("llama", settings=GRAPHS)
    for _ in range(2):
        agree(both, prompt(1, 9))
    for parameter in both.original.parameters():
        parameter.data.mul_(1.1)
    both.engine.refresh_weights(both.original)
    agree(both, prompt(1, 9))
    ids = prompt(30, 40)  # more than the cache that is there from the start has room for
    both.engine.generate(ids, max_new_tokens=2, do_sample=False)
    agree(both, prompt(1, 9))
    agree(both, prompt(1, 11))


def test_a_prompt_that_cannot_be_captured_runs_as_ever(
    prompts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.model.block.block import Block

    both, run = pair("llama", settings=GRAPHS), Block._run

    def reads_back(self: Block, x: torch.Tensor, *rest: Any) -> Any:
        if x.shape[0] > 1:
            x.sum().item()
        return run(self, x, *rest)

    monkeypatch.setattr(Block, "_run", reads_back)
    for _ in range(3):
        agree(both, prompt(1, 9))
        options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
        assert torch.equal(
            both.engine.generate(prompt(1, 4), **options), both.original.generate(prompt(1, 4), **options)
        )
    assert prompts == [32]  # tried once
    assert "decode steps are captured" in str(both.engine.report())
