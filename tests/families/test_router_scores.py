"""Routers that divide by a sum of scores: what is added to the sum shows where all scores are tiny."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.families import Family, Tiny
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.models import close, inject, prompt

NAMES = (
    "afmoe",
    "axk1",
    "deepseek_v3",
    "dots1",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "hy_v3",
    "solar_open",
)
CORRECTIONS = ("e_score_correction_bias", "expert_bias")


def routers(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each router's weight `(E, C)` and its correction `(E,)`."""
    for owner in model.modules():
        biases = [getattr(owner, name) for name in CORRECTIONS if hasattr(owner, name)]
        weights = [
            weight
            for name, weight in owner.named_parameters()
            if name in ("weight", "gate.weight", "router.gate.weight") and weight.dim() == 2
        ]
        if biases and weights:
            yield weights[0], biases[0]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[0].name in NAMES], ids=label)
def test_tiny_scores_weigh_experts_as_in_the_original(variant: tuple[Family, Tiny]) -> None:
    """All experts of a token score alike, many of them 1e-20 and less; a correction decides between them."""
    original: Any = peaked_model(variant[1])
    generator = torch.Generator().manual_seed(0)
    found = list(routers(original))
    assert found
    for weight, correction in found:
        experts, width = weight.shape
        alike = torch.randn(1, width, generator=generator) * 60 / width**0.5
        weight.data = alike + 1e-3 * torch.randn(experts, width, generator=generator)
        correction.data = torch.rand(experts, generator=generator)
    engine = inject(original)
    ids = prompt(4, 40)
    with torch.no_grad():
        # Rounding a logit of 60 changes its score by 4e-6; without what is added, answers are off by 1.
        close(original(input_ids=ids).logits, engine(input_ids=ids).logits, atol=1e-2)
