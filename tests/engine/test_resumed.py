"""Generation that continues from a cache of the caller: the same tokens, the same cache, fewer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig, StaticCache

from slipstream.engine.generation.runner import Session
from slipstream.ops.step import Step
from tests.engine.test_takeover import Streamed
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.caches import same_cache
from tests.helpers.models import Pair, close, inject, left_padded, make, pair, prompt, roads

KINDS = ["llama", "gpt2", "mistral", "gemma2", "gptj", "mixtral"]
OTHERS = ["youtu", "gemma3n_text", "gpt_oss", "roberta causal", "cohere2", "phi3"]
"""Families with latents, borrowed keys, sinks, positions that padding shifts, layers without rotation, and
one whose own method may drop the cache."""
HYBRIDS = [
    "qwen3_next mixed",
    "lfm2 convolutions",
    "nemotron_h",
    "granitemoehybrid state spaces",
    "olmo_hybrid",
]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


@pytest.fixture(params=[*KINDS, *OTHERS])
def attending(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    """A pair whose layers keep nothing but keys and values."""
    return pairs.setdefault(request.param, pairs.get(request.param) or _pair(request.param))


@pytest.fixture(params=[*KINDS, *OTHERS, *HYBRIDS])
def models(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault(request.param, pairs.get(request.param) or _pair(request.param))


@pytest.fixture
def llama(pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault("llama", pairs.get("llama") or pair("llama"))


def _pair(kind: str) -> Pair:
    if kind in KINDS:
        return pair(kind)
    name, _, label = kind.partition(" ")
    original = peaked_model(
        next(tiny for family, tiny in VARIANTS if family.name == name and label in (tiny.label, ""))
    )
    return Pair(original, inject(original))


@contextmanager
def tokens_run() -> Iterator[list[int]]:
    """Record the number of tokens in each call of a session, of which only the first has the prompt."""
    seen: list[int] = []

    def counted(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(self: Session, step: Step, *args: Any) -> Tensor:
            seen.append(len(step.token_ids))
            return plain(self, step, *args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("logits", "best", "drawn", "penalised"):
            patch.setattr(Session, name, counted(getattr(Session, name)))
        yield seen


def longer(sequences: Tensor, mask: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return sequences and mask with three more tokens, as the next turn of a conversation."""
    ids = torch.cat([sequences, prompt(len(sequences), 3, seed=seed)], dim=1)
    return ids, torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


def conversation(model: Any, cache: Any, ids: Tensor, mask: Tensor, **given: Any) -> list[Tensor]:
    """Generate three turns upon one cache, of which each but the first has three tokens more."""
    turns = []
    for turn in range(3):
        torch.manual_seed(turn)
        options = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None, "do_sample": False, **given}
        sequences = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)
        turns.append(sequences)
        ids, mask = longer(sequences, mask, turn)
    return turns


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "penalty": {"repetition_penalty": 1.3},
    "ends": {"eos_token_id": list(range(40, 60))},
}


@pytest.mark.parametrize("way", WAYS)
def test_turns_of_a_conversation(models: Pair, way: str) -> None:
    """Rows that end early go on with padding, which is in the cache, too."""
    ids, mask = left_padded()
    config = models.original.config
    theirs, ours = DynamicCache(config=config), DynamicCache(config=config)
    expected = conversation(models.original, theirs, ids, mask, **WAYS[way])
    with roads(models.engine) as counts, tokens_run() as steps:
        got = conversation(models.engine, ours, ids, mask, **WAYS[way])
    assert counts.taken == "engine"
    close(expected, got)
    same_cache(theirs, ours, longer(got[-1], mask, 0)[1])
    # The first prompt has 21 tokens without padding; later, each row lacks its last token and three new ones.
    assert steps[0] == 21 and max(steps[1:]) == 12


@pytest.mark.parametrize("made_by", ["original", "engine"])
def test_a_prefix_that_many_prompts_share(models: Pair, made_by: str) -> None:
    """It runs once, by a forward; each prompt then continues from a copy."""
    share(models, DynamicCache(config=models.original.config), made_by)


@pytest.mark.parametrize("made_by", ["original", "engine"])
def test_a_prefix_in_a_cache_that_knows_no_config(attending: Pair, made_by: str) -> None:
    """Its layers forget nothing, whatever their windows."""
    share(attending, DynamicCache(), made_by)


def share(models: Pair, first: Any, made_by: str) -> None:
    prefix = prompt(1, 45)
    with torch.no_grad():
        getattr(models, made_by)(input_ids=prefix, past_key_values=first, use_cache=True)
    assert first.get_seq_length() == 45
    for seed in range(2):
        ids = torch.cat([prefix, prompt(1, 2 + seed, seed=seed)], dim=1)
        caches = copy.deepcopy(first), copy.deepcopy(first)
        options = {"input_ids": ids, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        expected = models.original.generate(**options, past_key_values=caches[0])
        with roads(models.engine) as counts, tokens_run() as steps:
            got = models.engine.generate(**options, past_key_values=caches[1])
        assert counts.taken == "engine" and steps[0] == 2 + seed
        close(expected, got)
        same_cache(*caches, torch.ones_like(expected))
    assert first.get_seq_length() == 45


def test_padding_may_reach_beyond_the_cache(llama: Pair) -> None:
    ids, mask = left_padded()
    caches = DynamicCache(), DynamicCache()
    results = []
    for model, cache in zip((llama.original, llama.engine), caches, strict=True):
        model(input_ids=ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache)
        results.append(
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=6,
                eos_token_id=None,
                do_sample=False,
            )
        )
    close(*results)
    same_cache(*caches, torch.cat([mask, torch.ones(3, 6, dtype=torch.long)], dim=1))


def test_the_output_has_the_very_cache_that_was_given(llama: Pair) -> None:
    ids = prompt()
    cache = DynamicCache()
    streamed = Streamed()
    out = llama.engine.generate(
        input_ids=ids[:1],
        past_key_values=cache,
        return_dict_in_generate=True,
        max_new_tokens=3,
        streamer=streamed,
    )
    assert out.past_key_values is cache and cache.get_seq_length() == out.sequences.shape[1] - 1
    assert sum(streamed.tokens, []) == out.sequences[0].tolist()


def test_scores_are_those_of_the_original(llama: Pair) -> None:
    ids = prompt()
    results = []
    for model in (llama.original, llama.engine):
        cache = DynamicCache()
        model(input_ids=ids[:, :5], past_key_values=cache)
        results.append(
            model.generate(
                input_ids=ids,
                past_key_values=cache,
                max_new_tokens=5,
                do_sample=False,
                output_scores=True,
                output_logits=True,
                return_dict_in_generate=True,
            )
        )
    expected, got = results
    close(
        (expected.sequences, expected.scores, expected.logits),
        (got.sequences, got.scores, got.logits),
        atol=1e-3,
    )
    close(expected.past_key_values, got.past_key_values, atol=1e-3)


def test_a_stopped_call_leaves_the_cache_as_it_was(llama: Pair) -> None:
    class Stopped(Streamed):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.tokens) > 3:
                raise InterruptedError

    cache = DynamicCache()
    llama.engine(input_ids=prompt(1)[:, :5], past_key_values=cache)
    before = copy.deepcopy(cache)
    with pytest.raises(InterruptedError):
        llama.engine.generate(
            input_ids=prompt(1),
            past_key_values=cache,
            max_new_tokens=9,
            eos_token_id=None,
            streamer=Stopped(),
        )
    close(before, cache, atol=0)


@pytest.mark.parametrize(
    "settings",
    [{"dtype": torch.bfloat16}, {"quant": "int8"}, {"kv_cache_dtype": "int8"}, {"dtype": torch.float16}],
    ids=str,
)
def test_two_turns_write_what_one_call_over_all_tokens_writes(settings: dict[str, Any]) -> None:
    engine = inject(make("mistral"), **settings)
    cache = DynamicCache(config=engine.module.config)
    options = {"eos_token_id": None, "do_sample": False, "suppress_tokens": [0]}  # 0 would count as padding
    with roads(engine) as counts:
        first = engine.generate(prompt(), max_new_tokens=5, past_key_values=cache, **options)
        second = engine.generate(first, max_new_tokens=5, past_key_values=cache, **options)
        whole = engine.generate(prompt(), max_new_tokens=10, **options)
    assert counts.taken == "engine"
    assert cache.layers[0].keys.dtype == engine.module.dtype
    agreed = float((second == whole).float().mean())
    assert agreed == 1.0 if settings.get("dtype", torch.float32) == torch.float32 else agreed > 0.9


class _Own(DynamicCache):
    """A cache of the caller's own class, which may do anything."""


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "a static cache": (lambda config: StaticCache(config=config, max_cache_len=40), {}),
    "a class of the caller's": (lambda config: _Own(config=config), {}),
    "beams": (lambda config: DynamicCache(config=config), {"num_beams": 2}),
    "several sequences": (lambda _: DynamicCache(), {"num_return_sequences": 2, "do_sample": True}),
    "positions": (lambda _: DynamicCache(), {"position_ids": torch.arange(9)[None].expand(3, -1) + 1}),
    "a lookup": (lambda _: DynamicCache(), {"prompt_lookup_num_tokens": 2}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_road_does_not_support_is_left_to_the_original(llama: Pair, what: str) -> None:
    made, options = REFUSED[what]
    results = []
    for model in (llama.original, llama.engine):
        cache = made(llama.original.config)
        torch.manual_seed(1)
        with roads(llama.engine) as counts:
            try:
                tokens = model.generate(
                    input_ids=prompt(), past_key_values=cache, max_new_tokens=5, pad_token_id=0, **options
                )
                results.append((tokens, int(cache.get_seq_length())))
            except Exception as error:
                results.append((str(error), type(error)))
    assert counts.runner == 0
    assert results[0][1] == results[1][1]
    if isinstance(results[0][0], Tensor):
        close(results[0][0], results[1][0])
    else:
        assert results[0][0] == results[1][0]


@pytest.mark.parametrize("what", ["all tokens", "only the new ones", "another dtype", "another batch"])
def test_caches_that_do_not_fit_are_left_to_the_original(llama: Pair, what: str) -> None:
    ids = prompt()
    results: list[Any] = []
    for model in (llama.original, llama.engine):
        cache = DynamicCache()
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": cache}
        with torch.no_grad():
            model(input_ids=ids[:, : 9 if what == "all tokens" else 5], past_key_values=cache)
        if what == "only the new ones":
            given["input_ids"] = ids[:, 5:]
        elif what == "another dtype":
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.double(), layer.values.double()
        elif what == "another batch":
            cache.batch_select_indices(torch.tensor([0, 1]))
        with roads(llama.engine) as counts:
            try:
                results.append(
                    model.generate(**given, past_key_values=cache, max_new_tokens=5, do_sample=False)
                )
            except Exception as error:
                results.append(type(error))
    assert counts.runner == 0
    assert type(results[0]) is type(results[1])
    if isinstance(results[0], Tensor):
        close(*results)
    else:
        assert results[0] is results[1]


def test_a_window_whose_tokens_are_gone_is_not_read(pairs: dict[str, Pair]) -> None:
    """Of a prompt longer than the window, transformers keeps one token less than the window has."""
    models = pairs.setdefault("mistral", pairs.get("mistral") or pair("mistral"))
    ids = prompt(2, 14)
    caches = [DynamicCache(config=models.original.config) for _ in range(2)]
    results = []
    for model, cache in zip((models.original, models.engine), caches, strict=True):
        model(input_ids=ids[:, :12], past_key_values=cache)
        assert cache.layers[0].keys.shape[2] == 5
        with roads(models.engine) as counts:
            results.append(model.generate(ids, past_key_values=cache, max_new_tokens=8, eos_token_id=None))
    assert counts.taken == "engine"
    close(*results)
    same_cache(*caches, torch.ones_like(results[0]))


@pytest.mark.parametrize("isa", ["reference"])
def test_it_runs_on_the_reference_ops(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", isa)
    models = pair("mistral")
    caches = DynamicCache(), DynamicCache()
    ids, mask = left_padded()
    close(
        conversation(models.original, caches[0], ids, mask), conversation(models.engine, caches[1], ids, mask)
    )


def test_a_cache_that_forgets_more_than_the_model_is_left_to_the_original(llama: Pair) -> None:
    """Transformers attends to what a cache has, whatever the window of the model."""
    config = MistralConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
    )
    ids, results, caches = prompt(2, 9), [], []
    for model in (llama.original, llama.engine):
        caches.append(DynamicCache(config=config))
        options = {"past_key_values": caches[-1], "max_new_tokens": 12, "eos_token_id": None}
        results.append(model.generate(ids, do_sample=False, pad_token_id=0, **options))
    close(*results)
    close(*caches, atol=1e-3)


def hybrid(pairs: dict[str, Pair], name: str = "qwen3_next mixed") -> Pair:
    return pairs.setdefault(name, pairs.get(name) or _pair(name))


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_that_were_hidden_only_later_are_left_to_the_original(pairs: dict[str, Pair], name: str) -> None:
    models, ids, results = hybrid(pairs, name), prompt(3, 12), []
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    for model in (models.original, models.engine):
        cache = DynamicCache(config=models.original.config)
        with torch.no_grad():
            models.original(input_ids=ids[:, :5], past_key_values=cache, use_cache=True)
        options = {"past_key_values": cache, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        results.append(model.generate(ids, attention_mask=mask, pad_token_id=0, **options))
    close(*results)


@pytest.mark.parametrize("how", ["autocast", "hook"])
def test_what_transformers_keeps_is_found_neither_under_autocast_nor_under_hooks(how: str) -> None:
    models = _pair("qwen3_next mixed")
    seen: list[Any] = []
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            models.engine.generate(prompt(2), **options)
    else:
        modules = models.engine.module.named_modules()
        mixer = next(module for name, module in modules if name.endswith("linear_attn"))
        handle = mixer.register_forward_hook(lambda *_: seen.append(1))
        models.engine.generate(prompt(2), **options, eos_token_id=None)
        handle.remove()
        assert len(seen) == 3
    with roads(models.engine) as counts:
        got = models.engine.generate(prompt(2), **options).past_key_values
    assert counts.taken == "engine"
    expected = models.original.generate(prompt(2), **options).past_key_values
    same_cache(expected, got, torch.ones(2, 20))


def test_a_weight_that_is_computed_is_left_to_the_original(llama: Pair) -> None:
    models = copy.deepcopy(llama)
    results = []
    for model in (models.original, models.engine):
        torch.nn.utils.weight_norm(model.get_input_embeddings())
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=prompt()[:, :5], past_key_values=cache)
        results.append(model.generate(prompt(), past_key_values=cache, max_new_tokens=5, do_sample=False))
    close(*results)


def test_layers_of_different_lengths_are_left_to_the_original(llama: Pair) -> None:
    """Its mask is made for the first layer's length, which is 0 here, and does not fit the second."""
    ids, mask = left_padded()
    for model in (llama.original, llama.engine):
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
        cache.layers[0] = type(cache.layers[0])()
        with roads(llama.engine) as counts, pytest.raises(RuntimeError, match="must match"):
            model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5)
    assert counts.taken == "compatible"


def test_a_reset_cache_of_other_rows_is_no_place_for_states(pairs: dict[str, Pair]) -> None:
    models = hybrid(pairs)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cache = DynamicCache(config=models.original.config)
    models.engine.generate(prompt(2), past_key_values=cache, **options)
    cache.reset()
    with pytest.raises(RuntimeError):  # as the original does
        models.engine.generate(prompt(1), past_key_values=cache, **options)
    cache = DynamicCache(config=models.original.config)
    with roads(models.engine) as counts:
        models.engine.generate(prompt(1), past_key_values=cache, **options)
    assert counts.taken == "engine"
