"""Beams and what else the engine road leaves out run transformers' loops over fused layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.model.block.block import Block
from tests.helpers.models import (
    Pair,
    blocks_that_run,
    close,
    inject,
    left_padded,
    make,
    pair,
    prompt,
    roads,
)
from tests.helpers.tokens import letter_tokenizer

KINDS = ["llama", "gpt2", "mistral", "gemma2"]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


@pytest.fixture(params=KINDS)
def models(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault(request.param, pairs.get(request.param) or pair(request.param))


@pytest.fixture
def llama(pairs: dict[str, Pair]) -> Pair:
    return pairs.setdefault("llama", pairs.get("llama") or pair("llama"))


@pytest.fixture(autouse=True)
def blocks() -> Iterator[list[Block]]:
    """The blocks that ran, in order."""
    with blocks_that_run() as ran:
        yield ran.blocks


def both(
    models: Pair,
    *args: Any,
    seed: int = 3,
    blocks: list[Block] | None = None,
    road: str = "compatible",
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Generate with each from one seed, the engine on this road, and compare."""
    kwargs.setdefault("max_new_tokens", 8)
    torch.manual_seed(seed)
    expected = models.original.generate(*copy.deepcopy(args), **copy.copy(kwargs))
    torch.manual_seed(seed)
    with roads(models.engine) as counts:
        got = models.engine.generate(*copy.deepcopy(args), **copy.copy(kwargs))
    assert counts.taken == road
    if blocks is not None and road == "compatible":
        assert len(blocks) >= 2 * counts.module, "the fused blocks did not run"
    close(expected, got, atol=1e-3)
    return expected, got


MODES: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 3},
    "beam search, all beams": {
        "num_beams": 4,
        "num_return_sequences": 4,
        "length_penalty": 0.5,
        "early_stopping": True,
    },
    "beam search, no repeats": {"num_beams": 3, "no_repeat_ngram_size": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True, "top_k": 20},
    "no cache": {"use_cache": False},
    "no cache, sampling": {"use_cache": False, "do_sample": True},
    "beams in a static cache": {"num_beams": 3, "cache_implementation": "static"},
    "offloaded cache": {"cache_implementation": "offloaded"},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "beams with a prefix function": {
        "num_beams": 2,
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(10, 60)),
        "eos_token_id": None,
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_transformers_tokens(models: Pair, mode: str, blocks: list[Block]) -> None:
    single = mode == "prefill in chunks"
    ids, mask = (prompt(1, 12), torch.ones(1, 12, dtype=torch.long)) if single else left_padded()
    if mode == "offloaded cache" and not torch.cuda.is_available():
        pytest.skip("transformers offloads from a GPU")
    road = "engine" if mode.startswith("beam") else "compatible"
    both(models, input_ids=ids, attention_mask=mask, blocks=blocks, road=road, **MODES[mode])


def test_beams_with_scores(llama: Pair) -> None:
    wants = {"return_dict_in_generate": True, "output_scores": True}
    expected, got = both(llama, input_ids=prompt(), num_beams=3, road="engine", **wants)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=1e-3, rtol=1e-3)


def test_a_loop_of_the_models_own_runs_and_returns_what_it_likes(llama: Pair) -> None:
    class Own(transformers.LlamaForCausalLM):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return [super()._sample(*args, **kwargs), "and a sound"]

    model = Own(llama.original.config).eval()
    engine = inject(copy.deepcopy(model))
    with roads(engine) as counts:
        found = engine.generate(prompt(), max_new_tokens=5)
    expected = model.generate(prompt(), max_new_tokens=5)
    assert counts.taken == "compatible" and found[1] == expected[1]
    assert torch.equal(found[0], expected[0])


def test_a_quantized_cache(llama: Pair) -> None:
    pytest.importorskip("optimum.quanto", reason="the quantized cache needs a backend that is not installed")
    both(llama, input_ids=prompt(1), cache_implementation="quantized")


def test_a_refused_cache_is_refused_as_by_transformers(llama: Pair) -> None:
    for model in (llama.original, llama.engine):
        with pytest.raises(ValueError, match="cache_implementation"):
            model.generate(input_ids=prompt(1), cache_implementation="no such thing", max_new_tokens=2)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_the_users_own(models: Pair, kind: str) -> None:
    sequences = []
    for model in (models.original, models.engine):
        cache: Any = transformers.DynamicCache(config=model.config)
        if kind == "static":
            cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        sequences.append(model.generate(input_ids=prompt(), past_key_values=cache, max_new_tokens=8))
        assert cache.get_seq_length() > 9
    close(*sequences)


def test_hidden_states_and_attentions_of_generate() -> None:
    original = make("llama")
    original.set_attn_implementation("eager")
    models = Pair(original, inject(original))
    for wanted in ("output_hidden_states", "output_attentions"):
        expected, got = both(models, input_ids=prompt(), return_dict_in_generate=True, **{wanted: True})
        assert len(got[wanted.removeprefix("output_")]) == expected.sequences.shape[1] - 9


def test_a_custom_generate_of_the_users_own(llama: Pair) -> None:
    def first_only(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> Tensor:
        logits = model(input_ids=input_ids).logits[:, -1]
        return torch.cat([input_ids, logits.argmax(-1, keepdim=True)], dim=1)

    both(llama, input_ids=prompt(), custom_generate=first_only)


def test_a_model_whose_layers_are_not_all_fused_generates_too(pairs: dict[str, Pair], llama: Pair) -> None:
    engine = inject(llama.original, replace_with_kernel_inject=False)
    assert engine.report().level == "none"
    both(Pair(llama.original, engine), input_ids=prompt())


def test_token_healing(llama: Pair) -> None:
    tokenizer = letter_tokenizer()
    ids = tokenizer(["hello wor"], return_tensors="pt").input_ids
    try:
        expected = llama.original.generate(
            input_ids=ids, token_healing=True, tokenizer=tokenizer, max_new_tokens=4
        )
    except Exception as error:
        with pytest.raises(type(error)):
            llama.engine.generate(input_ids=ids, token_healing=True, tokenizer=tokenizer, max_new_tokens=4)
    else:
        got = llama.engine.generate(input_ids=ids, token_healing=True, tokenizer=tokenizer, max_new_tokens=4)
        close(expected, got)
