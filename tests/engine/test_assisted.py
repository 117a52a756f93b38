"""Assisted decoding, by a lookup in the prompt or by another model: transformers' tokens, in fewer steps."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream.engine.generation.generate as generation
from slipstream.engine.generation.batch import Batch
from slipstream.engine.generation.runner import Session
from slipstream.kernels.cpu.library import load
from slipstream.ops.step import Step
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import Pair, blocks_that_run, close, inject, make, pair, prompt, roads
from tests.helpers.tokens import letter_tokenizer

KINDS = ["llama", "gpt2", "mistral", "gemma2", "bloom"]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


@pytest.fixture(params=KINDS)
def models(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault(request.param, pairs.get(request.param) or pair(request.param))


@pytest.fixture
def llama(pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault("llama", pairs.get("llama") or pair("llama"))


def repeated(length: int = 30) -> Tensor:
    """Return a prompt whose end occurred before, so that a lookup finds something."""
    return prompt(1, 7).repeat(1, 8)[:, :length]


@contextmanager
def steps_of(engine: Any) -> Iterator[list[tuple[int, int]]]:
    """Record the tokens of each step of an engine, and the rows of logits."""
    seen: list[tuple[int, int]] = []
    plain = Session.logits

    def logits(self: Session, step: Step) -> Tensor:
        if self._runner is engine._built.runner:
            seen.append((len(step.token_ids), len(step.logit_rows)))
        return plain(self, step)

    Session.logits = logits  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Session.logits = plain  # type: ignore[method-assign]


def both(models: Pair, *, road: str = "engine", seed: int = 3, **given: Any) -> tuple[Any, Any]:
    """Generate with each from one seed, the engine on this road; compare the output and return both."""
    given = {"input_ids": repeated(), "max_new_tokens": 12, "pad_token_id": 0, **given}
    torch.manual_seed(seed)
    expected = models.original.generate(**given)
    torch.manual_seed(seed)
    with roads(models.engine) as counts:
        got = models.engine.generate(**given)
    assert counts.taken == road
    close(expected, got, atol=1e-3)
    return expected, got


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "suppressed": {"do_sample": False, "suppress_tokens": [7, 50, 80]},
    "minimum": {"do_sample": False, "min_new_tokens": 6},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_lookup_in_the_prompt(models: Pair, way: str) -> None:
    with steps_of(models.engine) as steps:
        both(models, prompt_lookup_num_tokens=4, **WAYS[way])
    assert steps[0][0] > 30 and max(rows for _, rows in steps) == 5, "nothing was looked up"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "engine", "itself"])
def test_an_assistant(llama: Pair, kind: str, way: str) -> None:
    """The assistant decides how fast, the model decides what."""
    draft = assistant(1)
    other = {"plain": draft, "engine": inject(draft), "itself": llama.engine}[kind]
    given = {"input_ids": prompt(1), "max_new_tokens": 12, "pad_token_id": 0, **WAYS[way]}
    if kind == "plain":
        both(llama, assistant_model=other, **given)
    if not WAYS[way]["do_sample"]:
        with roads(llama.engine) as counts:
            got = llama.engine.generate(**given, assistant_model=other)
        assert counts.taken == "engine" and torch.equal(got, llama.original.generate(**given))


@pytest.mark.parametrize("kind", ["draft", "itself"])
def test_sampled_drafts_leave_the_distribution_as_it_is(llama: Pair, kind: str) -> None:
    """What transformers' assistants draft depends on how they continue from a cache; what is kept does not.

    The frequencies of pairs of tokens are compared with their probabilities.
    """
    other = inject(assistant(1)) if kind == "draft" else llama.engine
    ids, warped = prompt(1), {"do_sample": True, "top_k": 3, "temperature": 2.0}
    count, seen = 500, torch.zeros(100, 100)
    torch.manual_seed(0)
    for _ in range(count):
        given = {"input_ids": ids, "max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0, **warped}
        found = llama.engine.generate(**given, assistant_model=other)
        seen[tuple(found[0, 9:11])] += 1
    first = probabilities(llama.original, ids)
    expected = torch.zeros(100, 100)
    for token in first.nonzero().flatten():
        after = probabilities(llama.original, torch.cat([ids, token.view(1, 1)], dim=1))
        expected[token] = count * first[token] * after
    is_possible = expected > 0
    assert not seen[~is_possible].any()
    distance = ((seen - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    assert distance < 26.1  # chi-square of 8 degrees of freedom exceeds it once in a thousand


def probabilities(model: Any, ids: Tensor) -> Tensor:
    """Return what a model gives each next token at temperature 2, among its best three."""
    with torch.no_grad():
        scores = model(ids).logits[0, -1] / 2
    return scores.masked_fill(scores < scores.topk(3).values[-1], -torch.inf).softmax(-1)


def assistant(layers: int, **settings: Any) -> Any:
    draft = make("llama", seed=5, num_hidden_layers=layers)
    settings = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", **settings}
    for name, value in {**settings, "assistant_confidence_threshold": 0.0, **settings}.items():
        setattr(draft.generation_config, name, value)
    return draft


def test_an_engine_holds_what_it_has_drafted(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only new tokens run, in the assistant and in the model."""
    made = []
    begin = Batch.__init__

    def counted(self: Batch, *args: Any, **kwargs: Any) -> None:
        made.append(args[0])
        begin(self, *args, **kwargs)

    monkeypatch.setattr(Batch, "__init__", counted)
    other = inject(assistant(1))
    with steps_of(other) as drafts, steps_of(llama.engine) as steps:
        both(llama, input_ids=prompt(1, 20), assistant_model=other, max_new_tokens=10)
    assert sorted(map(id, made)) == sorted(map(id, (llama.engine._built.runner, other._built.runner)))
    assert drafts[0] == (20, 1) and max(tokens for tokens, _ in drafts[1:]) <= 4
    assert steps[0] == (23, 4) and all(tokens == rows <= 4 for tokens, rows in steps[1:])


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient", "constant"])
@pytest.mark.parametrize("threshold", [0.0, 0.02])
def test_schedules_of_drafts_are_transformers(llama: Pair, schedule: str, threshold: float) -> None:
    """As many tokens are drafted, and the assistant's config is left alike."""
    asked = {"num_assistant_tokens_schedule": schedule, "assistant_confidence_threshold": threshold}
    pairs = Pair(assistant(2, **asked), inject(assistant(2, **asked)))
    given = {"input_ids": prompt(1), "max_new_tokens": 16, "pad_token_id": 0}
    lengths: list[list[int]] = []
    for model, helper in ((llama.original, pairs.original), (llama.engine, pairs.engine)):
        with drafted() as seen:
            model.generate(**given, assistant_model=helper)
        lengths.append(seen)
    assert lengths[0] == lengths[1] and lengths[0]
    names = [one.generation_config.num_assistant_tokens for one in (pairs.original, pairs.engine)]
    assert names[0] == names[1]


@contextmanager
def drafted() -> Iterator[list[int]]:
    """Record how many tokens each draft had."""
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    seen: list[int] = []
    own = AssistedCandidateGenerator.get_candidates

    def get(self: Any, ids: Tensor, **others: Any) -> Any:
        found = own(self, ids, **others)
        seen.append(found[0].shape[1] - ids.shape[1])
        return found

    AssistedCandidateGenerator.get_candidates = get  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        AssistedCandidateGenerator.get_candidates = own  # type: ignore[method-assign]


def test_everything_that_a_call_may_return(llama: Pair) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, got = both(llama, prompt_lookup_num_tokens=3, **wanted)
    assert len(got.scores) == len(got.logits) == got.sequences.shape[1] - 30
    layers = zip(expected.past_key_values.layers, got.past_key_values.layers, strict=True)
    for theirs, ours in layers:
        close(theirs.keys, ours.keys, atol=1e-3)
        close(theirs.values, ours.values, atol=1e-3)


def test_ends(llama: Pair) -> None:
    """An end token among those that were accepted ends the sequence there; the length is kept, too."""
    free = llama.original.generate(input_ids=repeated(), max_new_tokens=12, pad_token_id=0)
    for index in (31, 33, 36):
        both(llama, prompt_lookup_num_tokens=4, eos_token_id=[int(free[0, index])])
    for most in (1, 2, 3, 5):
        both(llama, prompt_lookup_num_tokens=8, max_new_tokens=most)


def test_tokens_are_streamed(llama: Pair) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def put(self, tokens: Tensor) -> None:
            self.seen.append(tokens.flatten().tolist())

        def end(self) -> None:
            self.seen.append([])

    streamers = []
    for model in (llama.original, llama.engine):
        streamers.append(Streamer())
        given = {"input_ids": repeated(), "max_new_tokens": 9, "pad_token_id": 0, "streamer": streamers[-1]}
        model.generate(**given, prompt_lookup_num_tokens=3)
    assert streamers[0].seen == streamers[1].seen and streamers[0].seen[-1] == []


def test_the_last_position_of_a_table(pairs: dict[str, Pair]) -> None:
    """Nothing is proposed beyond the model's positions, where transformers would fail."""
    models = pair("gpt2", n_positions=40)
    ids = repeated(34)
    got = models.engine.generate(input_ids=ids, max_new_tokens=6, pad_token_id=0, prompt_lookup_num_tokens=8)
    assert torch.equal(got, models.original.generate(input_ids=ids, max_new_tokens=6, pad_token_id=0))


@pytest.mark.parametrize("length", [30, 33, 40, 41, 42, 43, 44])
def test_prompts_in_chunks(llama: Pair, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "TOKEN_BUDGET", 10)
    with steps_of(llama.engine) as steps:
        both(llama, input_ids=repeated(length), prompt_lookup_num_tokens=4, max_new_tokens=6)
    assert max(tokens for tokens, _ in steps) <= 10


def test_a_padded_prompt(llama: Pair) -> None:
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), repeated()], dim=1)
    mask = (torch.arange(33) >= 3).long()[None]
    both(llama, input_ids=ids, attention_mask=mask, prompt_lookup_num_tokens=3)
    both(llama, input_ids=ids, attention_mask=mask, assistant_model=inject(assistant(1)))


def test_a_quantized_engine_and_cache() -> None:
    engine = inject(make("llama"), quant="int8", kv_cache_dtype="int8")
    given = {"input_ids": repeated(), "max_new_tokens": 12, "pad_token_id": 0}
    expected = engine.generate(**given)
    assert torch.equal(engine.generate(**given, prompt_lookup_num_tokens=4), expected)
    assert torch.equal(engine.generate(**given, assistant_model=inject(assistant(1))), expected)


@pytest.mark.parametrize("kind", ["plain", "engine"])
@pytest.mark.parametrize("sampling", [False, True])
def test_an_assistant_with_another_tokenizer(llama: Pair, kind: str, sampling: bool) -> None:
    """Its tokens are other ones, and with sampling its head is cut to those that both know."""
    found = []
    for model, wrap in ((llama.original, copy.deepcopy), (llama.engine, WRAPPED[kind])):
        tokens, others = letter_tokenizer(), letter_tokenizer()  # transformers keeps what it made of a pair
        others.add_tokens(["ab", "abc"])
        draft = wrap(make("llama", seed=5, num_hidden_layers=1, vocab_size=len(others)))
        helpers = {"assistant_model": draft, "tokenizer": tokens, "assistant_tokenizer": others}
        ids = tokens("abc abc ab", return_tensors="pt").input_ids
        torch.manual_seed(1)
        with roads(llama.engine) as counts:
            given = {"input_ids": ids, "max_new_tokens": 8, "pad_token_id": 0, "do_sample": sampling}
            found.append(model.generate(**given, **helpers))
    assert counts.taken == "engine"
    if sampling:  # transformers iterates over sets of strings there: its own tokens differ from call to call
        assert found[0].shape[1] <= (length := ids.shape[1]) + 8 and torch.equal(found[1][:, :length], ids)
    else:
        assert torch.equal(*found)


WRAPPED = {"plain": copy.deepcopy, "engine": inject}


def test_what_is_refused_is_refused_as_by_transformers(llama: Pair) -> None:
    small = make("llama", seed=5, num_hidden_layers=1, vocab_size=60)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("batch_size = 1", {"input_ids": prompt(2), "prompt_lookup_num_tokens": 3}),
        (
            "num_return_sequences",
            {"prompt_lookup_num_tokens": 3, "num_return_sequences": 2, "do_sample": True},
        ),
        ("different tokenizers", {"assistant_model": small}),
        ("different tokenizers", {"assistant_model": inject(small)}),
    ]
    for match, given in asked:
        for model in (llama.original, llama.engine):
            with pytest.raises(ValueError, match=match):
                model.generate(**{"input_ids": prompt(1), "max_new_tokens": 4, **given})


def test_states_cannot_be_taken_back() -> None:
    original = peaked_model(next(tiny for family, tiny in VARIANTS if family.name == "qwen3_next"))
    for model in (original, inject(original)):
        with pytest.raises(ValueError, match="stateful"):
            model.generate(input_ids=repeated(), prompt_lookup_num_tokens=3)


def test_an_engine_can_assist_a_plain_model(llama: Pair) -> None:
    ids = prompt(1)
    got = llama.original.generate(input_ids=ids, assistant_model=llama.engine, max_new_tokens=10)
    close(llama.original.generate(input_ids=ids, max_new_tokens=10), got)


def test_an_assistant_that_changes_between_drafts(llama: Pair) -> None:
    """Hooks put it back on its own forward; what it held is not used again."""
    other = inject(assistant(1))
    drafts = [0]

    class Counting(transformers.LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            drafts[0] += 1
            if drafts[0] == 4:
                other.module.model.norm.register_forward_hook(lambda *_: None)
            return scores

    given = {"input_ids": prompt(1), "max_new_tokens": 10, "logits_processor": [Counting()]}
    got = llama.engine.generate(**given, assistant_model=other)
    assert drafts[0] > 4 and torch.equal(got, llama.original.generate(**given))


@pytest.mark.parametrize("kind", ["lookup", "draft", "beams"])
def test_batches_are_released_at_once(llama: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches are as large as the prompt, and on a GPU the next generation waits for one of them."""
    made = []
    begin = Batch.__init__

    def noted(self: Batch, *args: Any, **kwargs: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **kwargs)

    monkeypatch.setattr(Batch, "__init__", noted)
    given = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "draft": {"assistant_model": inject(assistant(1))},
        "beams": {"num_beams": 2},
    }[kind]
    gc.collect()
    gc.disable()
    try:
        llama.engine.generate(input_ids=repeated(), max_new_tokens=6, pad_token_id=0, **given)
        assert made and not any(one() for one in made)
    finally:
        gc.enable()


@pytest.mark.skipif(load("baseline") is None, reason="no native library")
def test_a_step_is_one_native_call(llama: Pair) -> None:
    """Neither a block nor a stack of them is called from Python."""
    with blocks_that_run() as ran:
        llama.engine.generate(
            input_ids=repeated(), max_new_tokens=6, pad_token_id=0, prompt_lookup_num_tokens=3
        )
    assert not ran.blocks and not ran.calls
