"""Models that see: their own forward runs the prompt, and the engine road goes on from its cache."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.engine.generation import generate
from slipstream.engine.generation.batch import Batch
from slipstream.engine.generation.multimodal import Begun, last_tokens
from slipstream.model.frame.frame_spec import frame_within
from slipstream.spec import FrameSpec, Norm
from tests.helpers.models import roads
from tests.helpers.pictures import (
    LANGUAGE,
    PICTURE,
    QWEN,
    SPEAKING,
    TEXT,
    grown,
    qwen,
    qwen_asked,
    speaking,
    speaking_asked,
)

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "past a page": {"max_new_tokens": 40},
    "drawn": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "penalised": {"repetition_penalty": 1.4},
    "processed": {"no_repeat_ngram_size": 2},
    "ends": {"eos_token_id": list(range(3, 100, 9))},
    "one token": {"max_new_tokens": 1},
}
PLAIN = [prefix for prefix in SPEAKING if prefix != "PaliGemma"]
"""PaliGemma's language model names no frame: its tokens see each other within the prompt."""


def inject(model: Any, **settings: Any) -> Any:
    options = {"dtype": torch.float32, "replace_with_kernel_inject": True, **settings}
    return slipstream.init_inference(copy.deepcopy(model), **options)


def written(model: Any, given: dict[str, Tensor], options: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    return model.generate(**given, **{"max_new_tokens": 9, "pad_token_id": 0, "do_sample": False, **options})


class Streamed:
    """Keeps what is put into it."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        self.tokens.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.tokens.append([])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Begun]]:
    """The prompts that the road took over."""
    filled: list[Begun] = []
    fill = Batch.fill

    def recorded(batch: Batch, one: Begun) -> None:
        filled.append(one)
        fill(batch, one)

    monkeypatch.setattr(Batch, "fill", recorded)
    yield filled


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Any, Any]]:
    """Each model and its engine, made once."""
    return {}


def pair_of(pairs: dict[str, tuple[Any, Any]], prefix: str) -> tuple[Any, Any, dict[str, Tensor]]:
    if prefix not in pairs:
        original = qwen(prefix) if prefix in QWEN else speaking(prefix)
        pairs[prefix] = original, inject(original)
    return *pairs[prefix], qwen_asked(3) if prefix in QWEN else speaking_asked(prefix)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefix", [*PLAIN, *QWEN])
def test_what_follows_a_picture_is_what_the_original_writes(
    pairs: dict[str, tuple[Any, Any]], begun: list[Begun], prefix: str, way: str
) -> None:
    original, engine, given = pair_of(pairs, prefix)
    expected = written(original, given, WAYS[way])
    assert torch.equal(written(engine, given, WAYS[way]), expected)
    assert len(begun) == 1, engine.why_compatible()
    # A picture takes fewer positions than tokens where positions have three dims.
    assert all(shift < 0 for shift in begun[0].shifts) == (prefix in QWEN)
    text = {name: given[name] for name in ("input_ids", "attention_mask")}
    text["input_ids"] = text["input_ids"].clamp(max=89)
    assert torch.equal(written(engine, text, WAYS[way]), written(original, text, WAYS[way]))
    assert len(begun) == 2 and not any(begun[1].shifts)


@pytest.mark.parametrize("prefix", ["Llava", "Gemma3", "Qwen3VL"])
def test_a_record_has_the_scores_and_the_cache_of_the_original(
    pairs: dict[str, tuple[Any, Any]], begun: list[Begun], prefix: str
) -> None:
    original, engine, given = pair_of(pairs, prefix)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, got = (written(model, given, options) for model in (original, engine))
    assert len(begun) == 1
    assert torch.equal(expected.sequences, got.sequences)
    for theirs, ours in zip(expected.logits + expected.scores, got.logits + got.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    row = int(given["attention_mask"].sum(-1).argmax())  # one without padding
    for theirs, ours in zip(expected.past_key_values.layers, got.past_key_values.layers, strict=True):
        for one, other in ((theirs.keys, ours.keys), (theirs.values, ours.values)):
            torch.testing.assert_close(other[row], one[row], atol=1e-4, rtol=1e-4)


def test_streamers_see_each_token_once(pairs: dict[str, tuple[Any, Any]], begun: list[Begun]) -> None:
    original, engine, given = pair_of(pairs, "Llava")
    one = {name: value[:1] for name, value in given.items()}
    theirs, ours = Streamed(), Streamed()
    written(original, one, {"streamer": theirs})
    written(engine, one, {"streamer": ours})
    assert len(begun) == 1 and theirs.tokens == ours.tokens


def test_the_model_runs_the_prompt_and_the_road_what_follows(pairs: dict[str, tuple[Any, Any]]) -> None:
    _, engine, given = pair_of(pairs, "Llava")
    with roads(engine) as taken:
        written(engine, given, {"eos_token_id": None})
    assert taken.module == 1 and taken.runner >= 9, "the model's own forward ran more than the prompt"


@pytest.mark.parametrize("settings", [{"quant": "int8"}, {"quant": "int4"}, {"kv_cache_dtype": "int8"}])
def test_packed_weights_and_caches_are_filled_as_well(begun: list[Begun], settings: dict[str, Any]) -> None:
    engine = inject(speaking("Llava"), **settings)
    given = speaking_asked("Llava")
    tokens = written(engine, given, {"eos_token_id": None})
    assert len(begun) == 1
    # The same engine's layers one by one, upon transformers' cache.
    own = written(engine.module, given, {"eos_token_id": None})
    agreed = float((tokens == own).float().mean())
    assert agreed == 1.0 if "quant" in settings else agreed > 0.8


def test_beams_and_other_modes_are_left_to_transformers(
    pairs: dict[str, tuple[Any, Any]], begun: list[Begun]
) -> None:
    original, engine, given = pair_of(pairs, "Llava")
    for options in ({"num_beams": 3}, {"use_cache": False}, {"output_hidden_states": True}):
        assert torch.equal(written(engine, given, options), written(original, given, options))
    assert not begun


def test_a_step_that_asks_for_more_than_its_token_is_left_to_transformers(
    pairs: dict[str, tuple[Any, Any]], begun: list[Begun], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, engine, given = pair_of(pairs, "Llava")
    begin, name = generate.begin, "_update_model_kwargs_for_generation"
    update = getattr(type(original), name)

    def more(self: Any, *args: Any, **kwargs: Any) -> Any:
        return {**update(self, *args, **kwargs), "blocks_of_tokens": torch.ones(2, 1)}

    def begun_with_more(model: Any, *args: Any) -> Begun | None:
        with monkeypatch.context() as patch:
            patch.setattr(type(model), name, more)
            return begin(model, *args)

    monkeypatch.setattr(generate, "begin", begun_with_more)
    assert torch.equal(written(engine, given, {}), written(original, given, {}))
    assert not begun


def test_windows_that_a_prompt_passes_are_filled_with_what_is_left_of_it() -> None:
    config = transformers.LlavaConfig(
        vision_config=SPEAKING["Llava"]().vision_config,
        text_config=transformers.MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=7),
        image_token_index=100,
    )
    original = grown(config, "LlavaForConditionalGeneration")
    engine = inject(original)
    given = speaking_asked("Llava")
    assert torch.equal(
        written(engine, given, WAYS["past a page"]), written(original, given, WAYS["past a page"])
    )


def test_a_head_that_does_less_than_the_language_models_own_is_found(begun: list[Begun]) -> None:
    text = transformers.Cohere2Config(**LANGUAGE, logit_scale=0.05, sliding_window=8)
    tower = transformers.SiglipVisionConfig(**PICTURE, vision_use_head=False)
    config = transformers.AyaVisionConfig(vision_config=tower, text_config=text, image_token_index=100)
    original = grown(config, "AyaVisionForConditionalGeneration")
    engine = inject(original)
    given = {name: qwen_asked(3)[name] for name in ("input_ids", "attention_mask")}
    given["input_ids"] = given["input_ids"].clamp(max=89)
    options = {"return_dict_in_generate": True, "output_logits": True}
    expected, got = (written(model, given, options) for model in (original, engine))
    assert len(begun) == 1, engine.why_compatible()
    for theirs, ours in zip(expected.logits, got.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_names_of_a_part_are_found_below_the_model_that_has_it() -> None:
    spec = FrameSpec("model.layers", "model.embed_tokens", "lm_head", Norm("rms", 1e-6), "model.norm")
    whole = frame_within(spec, "language_model.model.layers")
    part = frame_within(spec, "model.language_model.layers")
    assert whole == dataclasses.replace(
        spec,
        layers="language_model.model.layers",
        embed="language_model.model.embed_tokens",
        head="language_model.lm_head",
        final_norm="language_model.model.norm",
    )
    assert part == dataclasses.replace(
        spec,
        layers="model.language_model.layers",
        embed="model.language_model.embed_tokens",
        final_norm="model.language_model.norm",
    )
    assert frame_within(spec, "model.language_model.blocks") is None


def test_what_a_cache_no_longer_has_is_zero() -> None:
    part = torch.arange(6.0).view(1, 3, 2) + 1
    assert last_tokens(part, 2).flatten().tolist() == [3, 4, 5, 6]
    assert last_tokens(part, 4).flatten().tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
