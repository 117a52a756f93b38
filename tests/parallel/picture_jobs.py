"""Ranks that share a language model which looks at pictures between its layers."""

from __future__ import annotations

import copy
from typing import Any

import torch

import slipstream
from tests.helpers.pictures import idefics as tiny_idefics
from tests.helpers.pictures import idefics_asked
from tests.parallel.jobs import from_first, parameter_bytes, split

_HEADS = ("model.layers.", "model.vision_model.", "model.gated_cross_attn_layers.")


def idefics(size: int, more: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """IDEFICS on several ranks beside one process: errors, tokens, levels, and the rank's share."""
    original = tiny_idefics(**more)
    engine: Any = split(copy.deepcopy(original), size, **settings)
    given = idefics_asked()
    mask = given["attention_mask"]
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
