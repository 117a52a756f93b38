"""Ranks that share a language model which looks at pictures between its layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

import slipstream
from tests.families.test_towers import _PICTURE, _TEXT, _grown
from tests.parallel.jobs import from_first, parameter_bytes, split

_HEADS = ("model.layers.", "model.vision_model.", "model.gated_cross_attn_layers.")


def idefics(size: int, more: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """IDEFICS on several ranks beside one process: errors, tokens, levels, and the rank's share."""
    config = transformers.IdeficsConfig(
        **_TEXT,
        additional_vocab_size=0,
        alpha_initializer="ones",
        vision_config={**_PICTURE, "embed_dim": 32},
        perceiver_config={"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2},
        **more,
    )
    original = _grown(config, "IdeficsForVisionText2Text")
    engine: Any = split(copy.deepcopy(original), size, **settings)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 100, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    seen = torch.ones(2, 9, 2, dtype=torch.long)
    seen[:, :5, 1] = seen[1, :3] = 0
    given = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 2, 3, 32, 32, generator=generator),
        "image_attention_mask": seen,
    }
    reference: Any = original
    if "quant" in settings:  # one process with the same words
        reference = slipstream.init_inference(copy.deepcopy(original), dtype=torch.float32, **settings)
    with torch.no_grad():
        expected = reference(**given).logits
        got = engine(**given).logits
    scale = max(1.0, float(expected.abs().max()))
    options = {"max_new_tokens": 8, "do_sample": False}
    tokens = from_first(size, lambda: reference.generate(**given, **options))
    beams = from_first(size, lambda: reference.generate(**given, num_beams=3, **options))
    whole = sum(p.numel() * p.element_size() for p in original.parameters())
    levels = {layer.name: layer.level for layer in engine.report().layers}
    return {
        "error": float((expected - got)[mask.bool()].abs().max()) / scale,
        "greedy": torch.equal(tokens, engine.generate(**given, **options)),
        "beams": torch.equal(beams, engine.generate(**given, num_beams=3, **options)),
        "levels": [{level for name, level in levels.items() if name.startswith(head)} for head in _HEADS],
        "share": parameter_bytes(engine) / whole,
    }
