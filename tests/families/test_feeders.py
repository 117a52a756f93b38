"""Experts of limited capacity (`feeders`), which replace the feed-forward and stay a part of their layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.families import FAMILIES
from slipstream.model.weights.packed import is_packed
from tests.families.calls import Calls
from tests.families.sweep import peaked_model
from tests.helpers.models import close, inject

KINDS = ("switch_transformers", "nllb-moe")
LIMITS = KINDS if transformers.__version__ >= "5.23" else ("nllb-moe",)
"""Families that drop tokens and return router logits; older releases of the first do neither."""


def _limited(family: str) -> Any:
    return peaked_model(FAMILIES[family].tiny[1])


def _given() -> dict[str, Tensor]:
    ids = torch.randint(3, 120, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :7].flip(1)}


@pytest.mark.parametrize("family", LIMITS)
def test_tokens_beyond_an_experts_capacity_are_left_out_as_by_the_original(family: str) -> None:
    original = _limited(family)
    engine = inject(original)
    layers = [original.get_submodule(layer.name) for layer in engine.report().layers]
    with torch.no_grad(), Calls(layers) as calls:
        expected, got = original(**_given()).logits, engine(**_given()).logits
        assert calls.blocks == calls.layers > 0
    close(expected, got, atol=1e-3)
    for name, module in original.named_modules():
        if name.endswith("router"):
            module.expert_capacity = 100
            module.moe_eval_capacity_token_fraction = 100.0
    with torch.no_grad():
        assert float((original(**_given()).logits - expected).abs().max()) > 0.1, "nothing was left out"


@pytest.mark.parametrize("family", LIMITS)
def test_what_routers_say_is_the_originals(family: str) -> None:
    original = _limited(family)
    engine = inject(original)
    with torch.no_grad():
        expected, got = (m(**_given(), output_router_logits=True) for m in (original, engine))
    for name in ("encoder_router_logits", "decoder_router_logits"):
        assert len(expected[name]) == len(got[name]) > 0
        for one, other in zip(expected[name], got[name], strict=True):
            parts = [each if isinstance(each, tuple) else (each,) for each in (one, other)]
            assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("family", KINDS)
def test_experts_are_packed_and_their_routers_are_not(family: str) -> None:
    engine = inject(_limited(family), quant="int8")
    packed = {name.rpartition(".")[2] for name, module in engine.module.named_modules() if is_packed(module)}
    assert packed >= {"wi", "wo"} or packed >= {"fc1", "fc2"}
    assert "classifier" not in packed


@pytest.mark.parametrize("family", KINDS)
def test_an_expert_that_is_changed_later_counts(family: str) -> None:
    original = copy.deepcopy(_limited(family))
    engine = inject(original)
    for model in (original, engine.module):
        for name, parameter in model.named_parameters():
            if ".expert_" in name:
                parameter.data.mul_(-2)
    with torch.no_grad():
        close(*(m(**_given()).logits for m in (original, engine)), atol=1e-3)


def test_experts_that_are_drawn_at_random_are_left_to_the_original() -> None:
    original = _limited("nllb-moe")
    original.config.second_expert_policy = "random"
    engine = inject(original)
    assert engine.report().level != "block"
    assert all("drawn at random" in layer.reason for layer in engine.report().layers)
