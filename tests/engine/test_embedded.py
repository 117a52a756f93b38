"""Prompts of embeddings: the model's own forward runs them, and the engine road what follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.caches import same_cache
from tests.helpers.models import Pair, close, inject, left_padded, pair, roads

NAMES = (
    "llama",
    "gpt2",
    "opt",
    "mistral",
    "gemma2",
    "gpt_neox",
    "youtu",
    "gpt_oss",
    "phi3",
    "roberta causal",
    "qwen3_next mixed",
    "lfm2 convolutions",
    "granitemoehybrid state spaces",
    "jamba state spaces",
)


@pytest.fixture(scope="module", params=NAMES)
def models(request: pytest.FixtureRequest) -> Pair:
    variants = [tiny for family, tiny in VARIANTS if request.param in (family.name, label((family, tiny)))]
    original: Any = peaked_model(variants[0])
    return Pair(original, inject(original))


def embedded(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, a mask that pads on the left, and embeddings that no ids have."""
    ids, mask = left_padded()
    with torch.no_grad():
        x = model.get_input_embeddings()(ids)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return ids, mask, x + 0.3 * x.std() * noise


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 10, "temperature": 1.5},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "ends": {"do_sample": False, "eos_token_id": list(range(40, 70))},
    "record": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
    "two of each": {"do_sample": True, "num_return_sequences": 2, "top_k": 5},
    "suppressed": {"do_sample": False, "suppress_tokens": [7, 50, 80], "min_new_tokens": 6},
}


def both(models: Pair, road: str = "engine", **given: Any) -> tuple[Any, Any]:
    given = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None, **given}
    answers = []
    for model in (models.original, models.engine):
        torch.manual_seed(3)
        with roads(models.engine) as counts:
            answers.append(model.generate(**given))
    # The model's own forward runs once.
    assert (counts.module == 1 and counts.runner > 0) == (road == "engine"), counts
    return answers[0], answers[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids", ["none", "the last", "all"])
def test_what_follows_is_what_the_original_writes(models: Pair, ids: str, way: str) -> None:
    tokens, mask, x = embedded(models.original)
    given = {"inputs_embeds": x, "attention_mask": mask, **WAYS[way]}
    if ids != "none":
        given["input_ids"] = tokens[:, -4:] if ids == "the last" else tokens
    expected, got = both(models, **given)
    if way == "record":
        close((expected.sequences, expected.scores), (got.sequences, got.scores), atol=1e-3)
        new = got.sequences.shape[1] - (0 if ids == "none" else given["input_ids"].shape[1])
        longer = torch.nn.functional.pad(mask, (0, new), value=1)
        same_cache(expected.past_key_values, got.past_key_values, longer)
    else:
        assert torch.equal(expected, got)


def test_without_a_mask_nothing_is_padding(models: Pair) -> None:
    _, _, x = embedded(models.original)
    assert torch.equal(*both(models, inputs_embeds=x, do_sample=False))
    assert torch.equal(*both(models, inputs_embeds=x[:1], do_sample=False, max_new_tokens=40))


def test_searches_and_searches_only_are_left_to_the_original() -> None:
    models = pair("llama")
    _, mask, x = embedded(models.original)
    given = {"inputs_embeds": x, "attention_mask": mask}
    assert torch.equal(*both(models, road="compatible", **given, num_beams=2))
    for shape in (x[:, :, None], x[:, :2]):
        with pytest.raises((RuntimeError, ValueError)):
            models.engine.generate(inputs_embeds=shape, attention_mask=mask, max_new_tokens=2)
