"""DeBERTa's distances: every length, beyond the table of distances too, padded on either side."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import slipstream

VARIANTS: dict[str, dict[str, Any]] = {
    "buckets": {"position_buckets": 8},
    "more buckets than distances": {"position_buckets": 128},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 6},
    "few buckets, own projections": {"position_buckets": 4, "share_att_key": False},
    "keys alone": {"position_buckets": 8, "pos_att_type": ["c2p"]},
    "queries alone": {"position_buckets": 8, "pos_att_type": ["p2c"], "share_att_key": False},
}
BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}


def build(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.DebertaV2Model(transformers.DebertaV2Config(**{**BASE, **VARIANTS[name]})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)  # so that distances matter
    return model


def fused(model: Any, dtype: torch.dtype = torch.float32) -> slipstream.InferenceEngine:
    return slipstream.init_inference(copy.deepcopy(model), dtype=dtype, replace_with_kernel_inject=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_length(name: str) -> None:
    original = build(name)
    engine = fused(original)
    assert "block" in str(engine.report())
    for length in (1, 2, 4, 5, 9, 33, 130):
        ids = torch.randint(3, 90, (3, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        if length > 4:
            mask[1, -3:], mask[2, :2] = 0, 0
        with torch.no_grad():
            answers = [model(ids, attention_mask=mask).last_hidden_state for model in (original, engine)]
        torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)


def test_distances_matter() -> None:
    original = build("buckets")
    ids = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = fused(original)(ids).last_hidden_state
        original.encoder.rel_embeddings.weight.mul_(-1.0)
        after = fused(original)(ids).last_hidden_state
    assert not torch.allclose(before, after, atol=1e-2)


def test_values_written_into_the_projections_count() -> None:
    models = [build("few buckets, own projections"), fused(build("few buckets, own projections"))]
    ids = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    for model in (models[0], models[1].module):
        with torch.no_grad():
            model.encoder.rel_embeddings.weight.mul_(2.0)
            model.encoder.layer[1].attention.self.pos_key_proj.weight.mul_(-1.0)
    with torch.no_grad():
        answers = [model(ids).last_hidden_state for model in models]
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)


def test_attention_maps_are_the_original_s() -> None:
    original = build("buckets")
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = [model(ids, output_attentions=True) for model in (original, fused(original))]
    for theirs, ours in zip(*(answer.attentions for answer in answers), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_16_bits_are_about_as_close_to_float32() -> None:
    original = build("buckets").bfloat16()
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = copy.deepcopy(original).float()(ids).last_hidden_state
        theirs, ours = (
            float((model(ids).last_hidden_state.float() - exact).norm())
            for model in (original, fused(original, torch.bfloat16))
        )
    assert 0 < ours <= 1.2 * theirs


def test_int8_weights() -> None:
    original = build("few buckets, own projections")
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, quant="int8", replace_with_kernel_inject=True
    )
    ids = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = (model(ids).last_hidden_state for model in (original, engine))
    assert 0 < float((ours - theirs).norm() / theirs.norm()) < 0.05
