"""Weights that are cut after the engine was built, as by structured pruning: the same memory, fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.test_cast_later import IDS, _encoders
from tests.helpers.models import close, pair, prompt


def _cut_feed_forward(model: Any) -> None:
    for layer in model.model.layers:
        mlp = layer.mlp
        half = mlp.down_proj.weight.shape[1] // 2
        mlp.gate_proj.weight.data = mlp.gate_proj.weight.data[:half]
        mlp.up_proj.weight.data = mlp.up_proj.weight.data[:half]
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :half]


def _cut_queries(model: Any) -> None:
    for layer in model.model.layers:
        attention, dim = layer.self_attn, layer.self_attn.head_dim
        attention.k_proj.weight.data = attention.k_proj.weight.data[:dim]
        attention.v_proj.weight.data = attention.v_proj.weight.data[:dim]
        attention.q_proj.weight.data = attention.q_proj.weight.data[: 2 * dim]
        attention.o_proj.weight.data = attention.o_proj.weight.data[:, : 2 * dim]


@pytest.mark.parametrize("cut", [_cut_feed_forward, _cut_queries])
def test_a_decoder_whose_weights_are_cut(cut: Callable[[Any], None]) -> None:
    models = pair("llama")
    with torch.no_grad():
        before = models.original(input_ids=prompt()).logits
        models.engine(input_ids=prompt())
        cut(models.original)
        cut(models.engine.module)
        expected = models.original(input_ids=prompt()).logits
        assert float((expected - before).abs().max()) > 0.01
        close(expected, models.engine(input_ids=prompt()).logits)
    wanted = models.original.generate(input_ids=prompt(), max_new_tokens=5)
    assert torch.equal(wanted, models.engine.generate(input_ids=prompt(), max_new_tokens=5))


def test_an_encoder_whose_weights_are_cut() -> None:
    original, engine = _encoders()
    with torch.no_grad():
        before = engine(input_ids=IDS)[0]
        for model in (original, engine.module):
            for layer in model.encoder.layer:
                for name in ("weight", "bias"):
                    whole = getattr(layer.intermediate.dense, name)
                    whole.data = whole.data[:24]
                layer.output.dense.weight.data = layer.output.dense.weight.data[:, :24]
        expected = original(input_ids=IDS)[0]
        assert float((expected - before).abs().max()) > 0.01
        close(expected, engine(input_ids=IDS)[0])
