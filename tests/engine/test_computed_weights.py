"""Weights around the layers that are computed when they are read: parametrized after the engine was built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.helpers.models import close, pair, prompt


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


PLACES = [
    ("llama", "model.norm", "weight"),
    ("llama", "lm_head", "weight"),
    ("gpt2", "transformer.ln_f", "weight"),
    ("gpt2", "transformer.ln_f", "bias"),
    ("gpt2", "transformer.wpe", "weight"),
    ("gpt2", "lm_head", "weight"),
    ("gptj", "transformer.ln_f", "bias"),
]


@pytest.mark.parametrize(("kind", "place", "name"), PLACES)
def test_a_parametrized_weight_counts(kind: str, place: str, name: str) -> None:
    models = pair(kind)
    for model in (models.original, models.engine.module):
        parametrize.register_parametrization(model.get_submodule(place), name, Doubled())
    _agree(models)


def test_a_normalized_head_counts() -> None:
    models = pair("gpt2")
    for model in (models.original, models.engine.module):
        weight_norm(model.get_submodule("lm_head"))
        with torch.no_grad():
            model.get_submodule("lm_head").parametrizations.weight.original0.mul_(1.5)
    _agree(models)


def _agree(models: Any) -> None:
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    expected = models.original.generate(input_ids=prompt(), **options)
    held = []
    for _ in range(3):
        got = models.engine.generate(input_ids=prompt(), **options)
        held.append([torch.full((1 << 12,), float("nan")) for _ in range(64)])  # takes memory that was freed
        close(torch.stack(expected.logits), torch.stack(got.logits))
        assert torch.equal(expected.sequences, got.sequences)
