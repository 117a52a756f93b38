"""Decode steps captured on the device that records: the same tokens, nothing captured anew, reasons told."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from slipstream.devices import NullDevice
from slipstream.model.block.paged_cache import BLOCK_SIZE
from tests.helpers.models import KINDS, close, inject, left_padded, make, pair, prompt

GRAPHS: dict[str, Any] = {"enable_cuda_graph": True}
GENERATORS = [
    kind
    for kind, (name, *_) in KINDS.items()
    if ("Causal" in name or "LMHead" in name) and kind not in ("mixtral", "dbrx")
]
GREEDY = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Engines run on the null device; what is captured is counted."""
    seen: list[Any] = []

    class Counting(NullDevice):
        def capture(self, run: Callable[[], Any], static: Any = None) -> Callable[[], Any]:
            if run.__name__ == "run":  # prompts have tests of their own
                seen.append(run)
            return super().capture(run, static)

    monkeypatch.setattr("slipstream.engine.build.choose", Counting)
    yield seen


@pytest.mark.parametrize("kind", GENERATORS)
def test_captured_steps_say_what_the_model_says(kind: str, captures: list[Any]) -> None:
    both = pair(kind, settings=GRAPHS)
    assert "captured as graphs" in str(both.engine.report())
    (ids, mask) = left_padded(3, 9)
    for given in ({"input_ids": prompt(1, 5)}, {"input_ids": ids, "attention_mask": mask}):
        expected = both.original.generate(**given, **GREEDY)
        assert torch.equal(both.engine.generate(**given, **GREEDY), expected)
    assert len(captures) == 2  # one row, and four for the batch of three


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_a_conversation_upon_one_cache_captures_nothing_anew(kind: str, captures: list[Any]) -> None:
    both, turns = pair(kind, settings=GRAPHS), []
    for model in (both.original, both.engine):
        ids, cache = prompt(1, 9), DynamicCache(config=both.original.config)
        for turn in range(3):
            settings = {"past_key_values": cache, "max_new_tokens": 8, "eos_token_id": None}
            ids = model.generate(ids, **settings, do_sample=False, pad_token_id=0)
            turns.append(ids)
            ids = torch.cat([ids, prompt(1, 5, seed=turn)], dim=1)
        turns.append(cache)
    close(turns[:4], turns[4:], atol=1e-3)
    assert len(captures) == 1


def test_growing_lengths_capture_nothing_anew(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    for length, new in ((3, 70), (40, 5), (9, 33)):
        settings = {"max_new_tokens": new, "do_sample": False}
        ids = prompt(1, length)
        assert torch.equal(both.engine.generate(ids, **settings), both.original.generate(ids, **settings))
    assert len(captures) == 1


def test_what_was_captured_within_inference_mode_serves_outside_of_it(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    ids = prompt(30, 40)  # more than the cache that is there from the start has room for
    with torch.inference_mode():
        both.engine.generate(ids, max_new_tokens=2, do_sample=False)
        both.engine(ids, use_cache=False)
    expected = both.original.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(both.engine.generate(ids, max_new_tokens=5, do_sample=False), expected)
    both.engine(ids, use_cache=False)


class _Forbid(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([7, 8, 9]), -torch.inf)


def test_sampling_processors_and_scores_see_each_step(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    ids = prompt(2, 6)
    settings = {"max_new_tokens": 12, "logits_processor": LogitsProcessorList([_Forbid()])}
    for mode in ({"do_sample": True, "top_k": 20}, {"do_sample": False}):
        found = []
        for model in (both.original, both.engine):
            torch.manual_seed(3)
            found.append(
                model.generate(ids, **settings, **mode, return_dict_in_generate=True, output_scores=True)
            )
        assert torch.equal(found[0].sequences, found[1].sequences)
        for theirs, ours in zip(found[0].scores, found[1].scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert captures


@pytest.mark.parametrize(
    "warp",
    [{"top_k": 0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, {"top_k": 3}],
    ids=str,
)
def test_a_seed_draws_the_same_tokens_within_captured_steps(warp: Any, captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    (ids, mask) = left_padded(3, 9)
    ends = [int(t) for t in range(20, 400, 7)]  # rows end here and there, in the middle of what runs ahead
    for settings in ({}, {"eos_token_id": ends}):
        found = []
        for model in (both.original, both.engine):
            torch.manual_seed(11)
            options = {"max_new_tokens": 40, "do_sample": True, **warp, **settings}
            found += [model.generate(ids, attention_mask=mask, **options), torch.rand(1)]
        # What is drawn after the generation is what would have been: nobody ran ahead for good.
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])
    # The step of the best, to know whether steps can be captured, and one that draws for each rung.
    assert 2 <= len(captures) <= 4


def test_settings_of_sampling_capture_nothing_anew(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    for top_k, temperature in ((5, 0.5), (50, 1.3)):
        found = []
        for model in (both.original, both.engine):
            torch.manual_seed(2)
            options = {"do_sample": True, "top_k": top_k, "temperature": temperature, "max_new_tokens": 12}
            found.append(model.generate(prompt(1, 6), **options))
        assert torch.equal(found[0], found[1])
    assert len(captures) == 2


def test_an_end_token_within_a_run_of_steps_ends_the_row(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    ids = prompt(3, 6)
    free = both.original.generate(ids, **GREEDY)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": int(free[1, 20]), "pad_token_id": 0}
    expected = both.original.generate(ids, **settings)
    assert torch.equal(both.engine.generate(ids, **settings), expected)


def test_a_weight_that_changed_is_captured_again(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    ids = prompt(1, 6)
    both.engine.generate(ids, **GREEDY)
    factor = torch.linspace(0.5, 2.0, 32)
    for model in (both.original, both.engine.module):
        model.model.norm.weight.data.mul_(factor)  # where it was: the graph reads it anew
    assert torch.equal(both.engine.generate(ids, **GREEDY), both.original.generate(ids, **GREEDY))
    for model in (both.original, both.engine.module):
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().flip(0))
    assert torch.equal(both.engine.generate(ids, **GREEDY), both.original.generate(ids, **GREEDY))
    assert len(captures) == 2


def test_new_weights_are_read_by_the_graphs_that_are_there(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    ids = prompt(1, 6)
    both.engine.generate(ids, **GREEDY)
    for seed in (1, 2):
        other = make("llama", seed=seed)
        both.engine.refresh_weights(other)
        assert torch.equal(both.engine.generate(ids, **GREEDY), other.generate(ids, **GREEDY))
    assert len(captures) == 1


@pytest.mark.parametrize("packed", ["int8", "int4"])
def test_new_packed_weights_are_read_by_the_graphs_that_are_there(packed: str, captures: list[Any]) -> None:
    both = pair("llama", settings={**GRAPHS, "quant": packed})
    other, ids = make("llama", seed=1), prompt(1, 6)
    first = both.engine.generate(ids, **GREEDY)
    before = len(captures)
    both.engine.refresh_weights(other)
    fresh = inject(other, quant=packed)
    expected = fresh.generate(ids, **GREEDY)
    assert not torch.equal(first, expected)
    assert torch.equal(both.engine.generate(ids, **GREEDY), expected)
    assert len(captures) == before == 1


def test_steps_used_long_ago_make_room(captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.generation.graph.MOST_GRAPHS", 3)
    both = pair("llama", settings=GRAPHS)
    for rows in (1, 2, 3, 1, 5, 9, 2):
        ids = prompt(rows, 4)
        expected = both.original.generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(both.engine.generate(ids, max_new_tokens=3, do_sample=False), expected)
    # Of one row twice in a row of uses, and of two anew once three others had come.
    assert len(captures) == 6
    assert len(both.engine._built.runner.whole._captured) == 3


@pytest.mark.parametrize("before", [3, 6, 20])
def test_rows_of_nobody_write_into_nobodys_block(before: int, captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    # Four short rows, then three whose blocks are among those that the fourth had.
    for ids, new in ((prompt(4, before), 3), (prompt(3, 40), 30)):
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        assert torch.equal(both.engine.generate(ids, **options), both.original.generate(ids, **options))
    assert len(captures) == 2


def test_rows_of_nobody_forget_whose_blocks_they_had(captures: list[Any]) -> None:
    """Steps that follow each other go on by the block table, also in the rows that nobody has."""
    both = pair("llama", settings=GRAPHS)
    options = {"max_new_tokens": 30, "do_sample": False}  # without processors, steps follow each other
    both.engine.generate(prompt(4, 6), **options)
    captured = both.engine._built.runner.whole._captured
    ((key, one),) = ((key, one) for key, one in captured.items() if key[0] == 4)
    places: list[int] = []

    def checked() -> torch.Tensor:
        places.append(int(one.step.slots[3]) // BLOCK_SIZE)
        return one.replay()

    captured[key] = replace(one, replay=checked)
    both.engine.generate(prompt(3, 6), **options)
    assert len(places) > 20 and set(places) == {one.scratch}


def test_logits_of_a_step_stay_when_the_next_one_runs(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    found = [
        model.generate(prompt(1, 6), **options, return_dict_in_generate=True).logits
        for model in (both.original, both.engine)
    ]
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert captures


def test_two_generations_at_once_do_not_share_a_cache(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    prompts = [prompt(1, 4 + i, seed=i) for i in range(4)]
    found: dict[int, Any] = {}

    def run(index: int) -> None:
        found[index] = both.engine.generate(prompts[index], **GREEDY)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, ids in enumerate(prompts):
        assert torch.equal(found[index], both.original.generate(ids, **GREEDY))


def test_a_copy_of_the_engine_has_graphs_of_its_own(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    ids = prompt(1, 6)
    twin = copy.deepcopy(both.engine)
    both.engine.module.model.norm.weight.data.zero_()
    assert torch.equal(twin.generate(ids, **GREEDY), both.original.generate(ids, **GREEDY))
    assert len(captures) == 2


def test_what_cannot_be_captured_runs_and_is_reported(captures: list[Any]) -> None:
    both = pair("mixtral", settings=GRAPHS)  # the reference of experts asks the host which were chosen
    ids = prompt(2, 6)
    assert torch.equal(both.engine.generate(ids, **GREEDY), both.original.generate(ids, **GREEDY))
    assert "enable_cuda_graph has no effect" in str(both.engine.report())
    assert "reads a value back" in str(both.engine.report())


def test_angles_that_changed_are_heard(captures: list[Any]) -> None:
    both = pair("llama", settings=GRAPHS)
    ids = prompt(2, 9)
    before = both.engine.generate(ids, **GREEDY)
    for change in ("values", "numbers"):
        for model in (both.engine.module, both.original):
            rotary: Any = model.model.rotary_emb
            if change == "values":
                rotary.inv_freq.mul_(0.31)
            else:
                rotary.attention_scaling = 1.7
        expected = both.original.generate(ids, **GREEDY)
        assert not torch.equal(expected, before), "the change must make a difference"
        assert torch.equal(both.engine.generate(ids, **GREEDY), expected)
        before = expected
