"""Layers with something in them that cannot be copied are fused where that does not matter, or say why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from tests.helpers.models import close, make, prompt


def _loss(layer: Any) -> None:
    layer.aux_loss = layer.mlp.up_proj.weight.requires_grad_().sum()  # as a forward with gradients leaves it


def _lock(layer: Any) -> None:
    layer.lock = threading.Lock()


def _norm(layer: Any) -> None:
    nn.utils.weight_norm(layer.mlp.up_proj)  # whose weight is made in every call


@pytest.mark.parametrize(
    ("put", "level", "said"),
    [(_loss, "block", ""), (_lock, "module", "cannot be copied for its check"), (_norm, "module", "")],
)
def test_it_does_not_stop_an_engine(put: Callable[[Any], None], level: str, said: str) -> None:
    model = make("llama")
    for layer in model.model.layers:
        put(layer)
    expected = model(input_ids=prompt()).logits.detach()
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine.report().level == level
    assert said in str(engine.report())
    close(expected, engine(input_ids=prompt()).logits)
    assert torch.equal(
        engine.generate(prompt(), max_new_tokens=3), make("llama").generate(prompt(), max_new_tokens=3)
    )
