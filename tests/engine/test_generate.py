"""Greedy search and sampling run on the engine road and give transformers' own tokens, with every option."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import slipstream
from slipstream.engine.generation import generate
from slipstream.engine.generation.batch import Batch
from slipstream.engine.generation.runner import Session
from slipstream.kernels.cpu.library import load
from slipstream.model.block.paged_cache import PagedCache
from slipstream.ops.step import Step
from tests.helpers.models import Pair, Roads, close, left_padded, pair, prompt, roads
from tests.helpers.tokens import letter_tokenizer

KINDS = ["llama", "gpt2", "mistral", "gemma2", "mixtral", "bloom"]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


@pytest.fixture(params=KINDS)
def models(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault(request.param, pairs.get(request.param) or pair(request.param))


@pytest.fixture
def llama(pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault("llama", pairs.get("llama") or pair("llama"))


@pytest.fixture
def gpt2(pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault("gpt2", pairs.get("gpt2") or pair("gpt2"))


def both(models: Pair, *args: Any, seed: int = 3, road: str = "engine", **kwargs: Any) -> tuple[Any, Any]:
    """Generate with each from one seed, and prove that the answers are one and the road was the right one."""
    kwargs.setdefault("max_new_tokens", 12)
    if kwargs["max_new_tokens"] is None:
        del kwargs["max_new_tokens"]
    torch.manual_seed(seed)
    expected = models.original.generate(*copy.deepcopy(args), **kwargs)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with roads(models.engine) as counts:
        got = models.engine.generate(*copy.deepcopy(args), **kwargs)
    assert counts.taken == road
    close(expected, got, atol=1e-3)
    assert torch.equal(state, torch.get_rng_state()), "the random state went another way"
    return expected, got


def test_greedy_search_of_a_padded_batch(models: Pair) -> None:
    ids, mask = left_padded()
    expected, _ = both(models, input_ids=ids, attention_mask=mask)
    assert len({tuple(row) for row in expected[:, 9:].tolist()}) == 3, "the rows say the same"


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33])
def test_greedy_search_of_one_row(models: Pair, length: int) -> None:
    both(models, input_ids=prompt(1, length))


@pytest.mark.parametrize("seed", range(3))
def test_sampling_draws_the_tokens_that_transformers_draws(models: Pair, seed: int) -> None:
    ids, mask = left_padded()
    both(models, input_ids=ids, attention_mask=mask, do_sample=True, seed=seed)


def test_sampling_follows_the_models_distribution(llama: Pair) -> None:
    """Exact tokens prove more, where the generator is the same; this would hold for any generator."""
    ids = prompt(1, 5)
    probabilities = llama.original(input_ids=ids).logits[0, -1].detach().div(1.5).softmax(-1)
    draws = llama.engine.generate(
        input_ids=ids, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=1, num_return_sequences=4000
    )[:, -1]
    share = torch.bincount(draws, minlength=probabilities.numel()) / 4000
    # Half of the summed differences of 4000 draws over 100 tokens is about 0.04 by chance.
    assert float((share - probabilities).abs().sum() / 2) < 0.08


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"do_sample": True, "temperature": 0.7},
    "top k": {"do_sample": True, "top_k": 5},
    "top p": {"do_sample": True, "top_p": 0.6},
    "no top p": {"do_sample": True, "top_p": 0.0},
    "a penalty before warpers": {"do_sample": True, "repetition_penalty": 1.3, "top_k": 9, "top_p": 0.8},
    "min p": {"do_sample": True, "min_p": 0.1},
    "typical p": {"do_sample": True, "typical_p": 0.5},
    "epsilon": {"do_sample": True, "epsilon_cutoff": 0.01},
    "eta": {"do_sample": True, "eta_cutoff": 0.01},
    "repetition penalty": {"repetition_penalty": 1.8},
    "reward for repetitions": {"repetition_penalty": 0.7},
    "penalty beside another": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    "penalty and sampling alone": {"do_sample": True, "repetition_penalty": 2.5, "top_k": 0},
    "penalty, rows that end early": {"repetition_penalty": 1.8, "eos_token_id": [2, *range(10, 30)]},
    "no repeated pairs": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[n] for n in range(40, 70)]},
    "bad pair": {"bad_words_ids": [[20, 30], [31]]},
    "sequence bias": {"sequence_bias": [[[7], 3.0], [[9, 11], -4.0]]},
    "suppressed": {"suppress_tokens": list(range(30, 60))},
    "suppressed first": {"begin_suppress_tokens": list(range(30, 90))},
    "forced end": {"forced_eos_token_id": 2},
    "exponential decay": {"exponential_decay_length_penalty": (2, 1.5)},
    "invalid values": {"remove_invalid_values": True},
    "renormalised": {"do_sample": True, "renormalize_logits": True, "top_k": 3},
    "min new tokens": {"min_new_tokens": 8},
    "min length": {"min_length": 15},
    "min length, rows that end early": {"min_length": 12, "eos_token_id": list(range(5, 60))},
    "a late end, drawn": {"do_sample": True, "min_new_tokens": 3, "eos_token_id": list(range(5, 60))},
    "a late end and a penalty": {"min_new_tokens": 8, "repetition_penalty": 1.8},
    "a late end, a penalty, drawn": {"do_sample": True, "min_new_tokens": 8, "repetition_penalty": 1.8},
    "a late end beside another": {"min_new_tokens": 8, "no_repeat_ngram_size": 2},
    "all but one suppressed": {"suppress_tokens": [n for n in range(100) if n != 17]},
    "a late end, and forced": {"min_new_tokens": 20, "forced_eos_token_id": 2},
    "several forced ends": {"forced_eos_token_id": [2, 7]},
    "max length": {"max_length": 14, "max_new_tokens": None},
    "default length": {"max_new_tokens": None},
    "three each": {"do_sample": True, "num_return_sequences": 3},
    "several ends": {"eos_token_id": [2, *range(10, 30)]},
    "an end in a tensor": {"eos_token_id": torch.tensor(20)},
    "several ends in a tensor": {"eos_token_id": torch.tensor([2, *range(10, 30)])},
    "an end in a tuple": {"eos_token_id": (2, 11, 12)},
    "no end": {"eos_token_id": None},
    "another pad": {"pad_token_id": 4, "eos_token_id": list(range(5, 50))},
    "watermark": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}, "do_sample": True},
    "one new token": {"max_new_tokens": 1},
    "static cache": {"cache_implementation": "static"},
    "static cache, drawn": {"cache_implementation": "static", "do_sample": True},
    "dynamic cache by name": {"cache_implementation": "dynamic"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_gives_transformers_tokens(llama: Pair, option: str) -> None:
    ids, mask = left_padded()
    both(llama, input_ids=ids, attention_mask=mask, **OPTIONS[option])


@pytest.mark.parametrize("option", ["several ends", "default length", "no repeated pairs", "top p"])
def test_every_option_works_for_learned_positions_too(gpt2: Pair, option: str) -> None:
    ids, mask = left_padded()
    both(gpt2, input_ids=ids, attention_mask=mask, **OPTIONS[option])


def test_guidance_runs_the_model_twice(llama: Pair) -> None:
    both(llama, input_ids=prompt(1), guidance_scale=1.5, road="both")


def test_rows_that_finish_early_are_dropped_and_change_nothing(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = []
    best = Session.best

    def counted(self: Session, step: Step, *args: Any) -> Tensor:
        tokens = best(self, step, *args)
        running.extend([len(step.kv_lens)] * tokens.shape[1])
        return tokens

    monkeypatch.setattr(Session, "best", counted)
    ids, mask = left_padded(6, 12)
    expected, _ = both(
        llama,
        input_ids=ids,
        attention_mask=mask,
        eos_token_id=list(range(5, 20)),
        max_new_tokens=24,
        pad_token_id=0,
    )
    assert running[0] == 6 and running[-1] < 6 and running == sorted(running, reverse=True)
    assert len(running) == expected.shape[1] - 12


def test_a_user_processor_and_criterion_are_called_as_by_transformers(llama: Pair) -> None:
    class Recorder(LogitsProcessor):
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            assert input_ids.view(-1).numel() == input_ids.numel()  # contiguous, as transformers' own are
            self.calls.append((input_ids.tolist(), tuple(scores.shape), scores.dtype))
            return scores.index_fill(1, torch.tensor([11, 12]), -float("inf"))

    class Stopper(StoppingCriteria):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.calls.append((input_ids.view(-1).tolist(), scores))
            return torch.tensor([input_ids.shape[1] >= 13 + row for row in range(input_ids.shape[0])])

    ids, mask = left_padded()
    records = []
    outputs = []
    for model in (llama.original, llama.engine):
        processor, stopper = Recorder(), Stopper()
        outputs.append(
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=20,
                eos_token_id=None,
                logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList([stopper]),
            )
        )
        records.append((processor.calls, stopper.calls))
    close(*outputs)
    assert records[0] == records[1]


def test_prefix_function_constrains_the_tokens(llama: Pair) -> None:
    _, got = both(
        llama,
        input_ids=prompt(),
        prefix_allowed_tokens_fn=lambda row, ids: list(range(10 + row, 90, 3)),
        eos_token_id=None,
    )
    assert all(int(token) % 3 == (10 + row) % 3 for row in range(3) for token in got[row, 9:])


class Streamer:
    """Records what a streamer is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.told.append(value.clone())

    def end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"repetition_penalty": 1.8}, {"do_sample": True, "repetition_penalty": 1.8}],
    ids=str,
)
@pytest.mark.parametrize("ends", [None, list(range(5, 20))], ids=["to the end", "rows end early"])
def test_a_streamer_is_told_what_transformers_tells_it(
    llama: Pair, rows: int, options: dict[str, Any], ends: list[int] | None
) -> None:
    told = []
    for model in (llama.original, llama.engine):
        streamer = Streamer()
        torch.manual_seed(3)
        model.generate(
            input_ids=prompt(rows),
            max_new_tokens=24,
            streamer=streamer,
            eos_token_id=ends,
            pad_token_id=0,
            **options,
        )
        told.append(streamer.told)
    assert told[0][-1] == told[1][-1] == "end"
    close(told[0][:-1], told[1][:-1])


@pytest.mark.skipif(load() is None, reason="no native library, whose steps can tell of themselves")
def test_a_streamer_costs_no_call_per_token(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    known, count = [], [0]
    best = Session.best

    def counted(self: Session, *args: Any) -> Tensor:
        count[0] += 1
        tokens = best(self, *args)
        known.append(len(streamer.told))
        return tokens

    monkeypatch.setattr(generate._Pace, "SECONDS", 60.0)  # however slow the machine is
    monkeypatch.setattr(Session, "best", counted)
    streamer = Streamer()
    out = llama.engine.generate(input_ids=prompt(1), max_new_tokens=24, streamer=streamer)
    new = out.shape[1] - 9
    assert new > 6 and len(streamer.told) == new + 2
    assert count == [3], "the prompt, a step that is timed, and all the others"
    assert known == [1, 2, new], "all but a call's last token are told before it returns, the prompt first"


@pytest.mark.skipif(load() is None, reason="no native library, whose steps can penalise")
@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=str)
def test_a_penalty_costs_no_call_per_token(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    counts = []
    penalised = Session.penalised

    def counted(self: Session, *args: Any) -> Tensor:
        tokens = penalised(self, *args)
        counts.append(tokens.shape[1])
        return tokens

    monkeypatch.setattr(generate._Pace, "SECONDS", 60.0)  # however slow the machine is
    monkeypatch.setattr(Session, "penalised", counted)
    llama.engine.generate(
        input_ids=prompt(1), max_new_tokens=24, eos_token_id=None, repetition_penalty=1.5, **options
    )
    assert counts == [1, 1, 22], "the prompt, a step that is timed, and all the others"


@pytest.mark.skipif(load() is None, reason="no native library, whose steps can suppress")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_new_tokens": 24}, [1, 1, 22]),
        ({"min_new_tokens": 5}, [1, 1, 3, 19]),
        ({"suppress_tokens": [3, 4]}, [1, 1, 22]),
        ({"bad_words_ids": [[3], [4]]}, [1, 1, 22]),
        ({"begin_suppress_tokens": [3, 4]}, [1, 1, 22]),
        ({"forced_eos_token_id": 5}, [1, 1, 21, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"repetition_penalty": 1.5}], ids=str)
def test_suppressed_tokens_cost_no_call_per_token(
    llama: Pair,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    more: dict[str, Any],
    expected: list[int],
) -> None:
    counts = []
    most = Batch._most

    def counted(self: Batch, steps: int) -> int:
        counts.append(most(self, steps))
        return counts[-1]

    monkeypatch.setattr(generate._Pace, "SECONDS", 60.0)  # however slow the machine is
    monkeypatch.setattr(Batch, "_most", counted)
    out = llama.engine.generate(input_ids=prompt(1), max_new_tokens=24, eos_token_id=99, **options, **more)
    assert out.shape[1] == 33, "the end token was said"
    assert counts == expected, "the prompt, a step that is timed, and all the others"


def test_what_a_generation_kept_is_freed_when_it_ends(llama: Pair) -> None:
    gc.collect()
    gc.disable()
    try:
        for streamer in (None, Streamer()):
            llama.engine.generate(input_ids=prompt(1), max_new_tokens=24, streamer=streamer)
            assert not any(isinstance(thing, PagedCache) for thing in gc.get_objects())
    finally:
        gc.enable()


def test_a_streamer_may_end_a_generation_or_begin_another(llama: Pair) -> None:
    ids = prompt(2)
    expected = llama.engine.generate(input_ids=ids, max_new_tokens=24)

    class Busy(Streamer):
        def put(self, value: Tensor) -> None:
            super().put(value)
            assert torch.equal(llama.engine.generate(input_ids=ids, max_new_tokens=4), expected[:, :13])
            if len(self.told) == 10:
                raise InterruptedError("enough")

    busy = Busy()
    assert torch.equal(
        llama.engine.generate(input_ids=ids, max_new_tokens=8, streamer=busy), expected[:, :17]
    )
    busy = Busy()
    with pytest.raises(InterruptedError, match="enough"):
        llama.engine.generate(input_ids=ids, max_new_tokens=24, streamer=busy)
    assert len(busy.told) == 10
    assert torch.equal(llama.engine.generate(input_ids=ids, max_new_tokens=24), expected)


def test_text_streamers_work(llama: Pair) -> None:
    tokenizer = letter_tokenizer()
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    with roads(llama.engine) as counts:
        ids = llama.engine.generate(input_ids=prompt(1), max_new_tokens=6, streamer=streamer)
    assert counts.taken == "engine"
    assert "".join(streamer) == tokenizer.decode(ids[0, 9:])


@pytest.mark.parametrize("way", ["argument", "generation config", "kept config"])
def test_stop_strings(llama: Pair, way: str) -> None:
    tokenizer = letter_tokenizer()
    ids = prompt(2)
    free = llama.original.generate(input_ids=ids, max_new_tokens=12)
    stop = [tokenizer.decode(free[0, 12:13]), tokenizer.decode(free[1, 15:16])]
    extra: dict[str, Any] = {"stop_strings": stop}
    if way == "generation config":
        extra = {"generation_config": GenerationConfig(stop_strings=stop, max_new_tokens=12, pad_token_id=0)}
    elif way == "kept config":
        for model in (llama.original, llama.engine):
            model.generation_config.stop_strings = stop
        extra = {}
    road = "engine" if way == "argument" else "compatible"
    try:
        expected, _ = both(llama, input_ids=ids, tokenizer=tokenizer, road=road, **extra)
    finally:
        for model in (llama.original, llama.engine):
            model.generation_config.stop_strings = None
    assert expected.shape[1] < free.shape[1]


def test_stop_strings_without_a_tokenizer_are_refused_as_by_transformers(llama: Pair) -> None:
    for model in (llama.original, llama.engine):
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(input_ids=prompt(1), stop_strings=["w1"], max_new_tokens=3)


def test_a_dictionary_of_outputs_is_transformers_own(llama: Pair) -> None:
    ids, mask = left_padded()
    for options in ({}, {"do_sample": True, "top_k": 4}, {"eos_token_id": list(range(5, 40))}):
        wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        torch.manual_seed(0)
        expected = llama.original.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=6, **wants, **options
        )
        torch.manual_seed(0)
        with roads(llama.engine) as counts:
            got = llama.engine.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=6, **wants, **options
            )
        assert counts.taken == "engine"
        assert torch.equal(expected.sequences, got.sequences)
        assert len(got.scores) == len(got.logits) == expected.sequences.shape[1] - 9
        alive = torch.ones(3, dtype=torch.bool)
        for step, (one, other) in enumerate(zip(expected.logits, got.logits, strict=True)):
            torch.testing.assert_close(other[alive], one[alive], atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(
                got.scores[step][alive], expected.scores[step][alive], atol=1e-3, rtol=1e-3
            )
            alive &= ~torch.isin(
                expected.sequences[:, 9 + step], torch.tensor(options.get("eos_token_id", [2]))
            )


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_cache_that_is_returned_is_of_the_kind_that_was_asked_for(llama: Pair, kind: str) -> None:
    given = {"return_dict_in_generate": True, "cache_implementation": kind}
    expected, got = both(llama, input_ids=prompt(), road="compatible", **given)
    assert type(got.past_key_values) is type(expected.past_key_values)


def test_scores_are_absent_unless_asked_for(llama: Pair) -> None:
    got = llama.engine.generate(input_ids=prompt(1), max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(got, transformers.generation.GenerateDecoderOnlyOutput)
    assert list(got) == list(
        llama.original.generate(input_ids=prompt(1), max_new_tokens=3, return_dict_in_generate=True)
    )


def test_generation_continues_from_a_returned_cache(models: Pair) -> None:
    if models.original.config.model_type == "bloom":
        pytest.skip("BLOOM makes its slopes from the mask, which generate cuts to the new tokens")
    ids, mask = left_padded()
    results = []
    for model in (models.original, models.engine):
        first = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=5,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
        longer = torch.cat([mask, torch.ones(3, first.sequences.shape[1] - 9, dtype=torch.long)], dim=1)
        cache = first.past_key_values
        seen = cache.get_seq_length()
        second = model.generate(
            input_ids=first.sequences,
            attention_mask=longer,
            past_key_values=cache,
            max_new_tokens=5,
            eos_token_id=None,
        )
        results.append((first.sequences, seen, second))
    assert results[0][1] == results[1][1]
    close((results[0][0], results[0][2]), (results[1][0], results[1][2]))
    whole = models.original.generate(input_ids=ids, attention_mask=mask, max_new_tokens=10, eos_token_id=None)
    close(whole, results[1][2])


@pytest.mark.parametrize("way", ["input_ids", "inputs", "positional", "positional with config"])
def test_the_prompt_may_come_in_any_way(llama: Pair, way: str) -> None:
    ids = prompt()
    config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=3, eos_token_id=2, pad_token_id=0)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "input_ids": ((), {"input_ids": ids}),
        "inputs": ((), {"inputs": ids}),
        "positional": ((ids,), {}),
        "positional with config": ((ids, config), {"max_new_tokens": None}),
    }
    args, kwargs = calls[way]
    both(llama, *args, **kwargs)


def test_beside_embeddings_the_ids_may_be_empty(llama: Pair) -> None:
    embedded = llama.original.get_input_embeddings()(prompt()).detach()
    given = {"input_ids": prompt()[:, :0], "inputs_embeds": embedded, "max_new_tokens": 4}
    close(llama.original.generate(**given), llama.engine.generate(**given))
    with pytest.raises(slipstream.RequestError, match="the batch is empty"):
        llama.engine.generate(**{**given, "inputs_embeds": embedded[:0]})


def test_a_generation_config_by_name_with_an_override(llama: Pair) -> None:
    config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.3, eos_token_id=2, pad_token_id=0)
    before = config.to_dict()
    expected, _ = both(llama, input_ids=prompt(), generation_config=config, max_new_tokens=4)
    assert expected.shape[1] == 13 and config.to_dict() == before


def test_without_an_input_generation_starts_from_bos(llama: Pair) -> None:
    both(llama, road="compatible")


def test_the_engines_own_generation_config_counts(llama: Pair) -> None:
    changed = GenerationConfig(max_new_tokens=4, do_sample=True, top_k=2, eos_token_id=2, pad_token_id=0)
    before = llama.original.generation_config
    try:
        for model in (llama.original, llama.engine):
            model.generation_config = changed
        expected, _ = both(llama, input_ids=prompt(), max_new_tokens=None)
    finally:
        for model in (llama.original, llama.engine):
            model.generation_config = before
    assert expected.shape[1] == 13


@pytest.mark.parametrize("mask", ["gaps", "right", "twos", "all zeros row"])
def test_masks_that_are_not_left_padding_take_the_compatible_road(llama: Pair, mask: str) -> None:
    visible = torch.ones(3, 9, dtype=torch.long)
    visible[0] = {
        "gaps": torch.tensor([1, 1, 0, 0, 1, 1, 0, 1, 1]),
        "right": torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 0]),
        "twos": torch.tensor([0, 0, 2, 2, 2, 2, 2, 2, 2]),  # positions are their sum
        "all zeros row": torch.zeros(9, dtype=torch.long),
    }[mask]
    expected = llama.original.generate(input_ids=prompt(), attention_mask=visible, max_new_tokens=6)
    with roads(llama.engine) as counts:
        got = llama.engine.generate(input_ids=prompt(), attention_mask=visible, max_new_tokens=6)
    assert counts.taken == "compatible"
    rows = slice(1, None) if mask == "all zeros row" else slice(None)  # what attends to nothing means nothing
    assert torch.equal(expected[rows], got[rows])


@pytest.mark.parametrize(
    "mask", [torch.ones(3, 9), torch.ones(3, 9, dtype=torch.bool)], ids=["float", "bool"]
)
def test_masks_of_every_dtype(llama: Pair, mask: Tensor) -> None:
    mask = mask.clone()
    mask[0, :2] = 0
    both(llama, input_ids=prompt(), attention_mask=mask)


def test_a_prompt_in_int32_becomes_int64_as_by_transformers(llama: Pair) -> None:
    expected, _ = both(llama, prompt().int(), max_new_tokens=4)
    assert expected.dtype == torch.int64


def test_padding_is_found_in_the_ids_where_no_mask_is_given(llama: Pair) -> None:
    ids, _ = left_padded()
    both(llama, input_ids=ids)


@pytest.mark.parametrize("places", [(2,), (8,), (3, 7, 8), tuple(range(9))], ids=str)
def test_padding_that_is_found_elsewhere_takes_the_compatible_road(
    llama: Pair, places: tuple[int, ...]
) -> None:
    ids = prompt()
    ids[0, list(places)] = 50
    expected = llama.original.generate(input_ids=ids, pad_token_id=50, max_new_tokens=6)
    with roads(llama.engine) as counts:
        got = llama.engine.generate(input_ids=ids, pad_token_id=50, max_new_tokens=6)
    assert counts.taken == "compatible"
    rows = slice(1, None) if len(places) == 9 else slice(None)  # what attends to nothing means nothing
    assert torch.equal(expected[rows], got[rows])


def test_a_token_that_pads_and_ends_is_no_padding_within_a_prompt(llama: Pair) -> None:
    ids = prompt()
    ids[0, 4] = 50
    both(llama, input_ids=ids, pad_token_id=50, eos_token_id=[50, 51])


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    yield lambda budget: monkeypatch.setattr(generate, "TOKEN_BUDGET", budget)


@pytest.mark.parametrize("budget", [1, 4, 7, 64])
def test_prompts_longer_than_a_step_run_in_chunks(models: Pair, budget: int, small_steps: Any) -> None:
    small_steps(budget)
    ids, mask = left_padded(2, 37)
    with roads(models.engine) as counts:
        got = models.engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, eos_token_id=None)
    tokens = int(mask.sum())
    assert counts.runner >= -(-tokens // budget) + 4
    close(
        models.original.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, eos_token_id=None), got
    )


def test_a_batch_of_more_rows_than_a_step_has_tokens(llama: Pair, small_steps: Any) -> None:
    small_steps(3)
    ids, mask = left_padded(4, 9)
    both(llama, input_ids=ids, attention_mask=mask)


def test_one_run_of_the_model_per_token(llama: Pair) -> None:
    with roads(llama.engine) as counts:
        llama.engine.generate(input_ids=prompt(), max_new_tokens=7, eos_token_id=None)
    assert counts == Roads(runner=7, module=0)


def test_the_cache_is_as_large_as_the_tokens_need(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    init = PagedCache.__init__

    def noted(self: PagedCache, specs: Any, blocks: int, **kwargs: Any) -> None:
        made.append(blocks)
        init(self, specs, blocks, **kwargs)

    monkeypatch.setattr(PagedCache, "__init__", noted)
    llama.engine.generate(input_ids=prompt(2, 9), max_new_tokens=23, eos_token_id=None)
    assert made == [2]
    llama.engine.generate(input_ids=prompt(2, 9), max_new_tokens=24, eos_token_id=None)
    assert made == [2, 4]


def test_max_time_stops(llama: Pair) -> None:
    got = llama.engine.generate(input_ids=prompt(1), max_time=0.0, max_new_tokens=50, eos_token_id=None)
    assert got.shape[1] == 10


def test_autocast_counts() -> None:
    """It rounds each product; so large are the weights that other tokens come of it."""
    two = pair("llama", gain=4.0)
    given = {"input_ids": prompt(), "max_new_tokens": 12, "do_sample": False}
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected = two.original.generate(**given, output_logits=True, return_dict_in_generate=True)
        got = two.engine.generate(**given, output_logits=True, return_dict_in_generate=True)
    assert expected.logits[0].dtype == got.logits[0].dtype
    error = (expected.logits[0].float() - got.logits[0].float()).abs().max()
    plain = two.engine.generate(**given, output_logits=True, return_dict_in_generate=True)
    rounded = (expected.logits[0].float() - plain.logits[0].float()).abs().max()
    assert float(rounded) > 0 and float(error) <= 2 * float(rounded)
    assert two.engine.generate(**given).tolist() == two.original.generate(**given).tolist()


def test_a_list_of_ids_is_refused_as_by_transformers(llama: Pair) -> None:
    for model in (llama.original, llama.engine):
        with pytest.raises((AttributeError, TypeError, ValueError)):
            model.generate(input_ids=[[5, 6, 7]], max_new_tokens=2)


def test_unknown_arguments_are_refused_as_by_transformers(llama: Pair) -> None:
    for model in (llama.original, llama.engine):
        with pytest.raises(ValueError, match="not_an_option"):
            model.generate(input_ids=prompt(1), not_an_option=3, max_new_tokens=2)


def test_the_result_is_the_callers_own(llama: Pair) -> None:
    first = llama.engine.generate(input_ids=prompt(), max_new_tokens=4)
    copy_of_first = first.clone()
    llama.engine.generate(input_ids=prompt(seed=9), max_new_tokens=4)
    assert torch.equal(first, copy_of_first) and first.is_contiguous()


def test_a_module_without_generate_says_so() -> None:
    models = pair("bert")
    with pytest.raises(Exception, match="generate|compatible"):
        models.engine.generate(input_ids=prompt(1))
