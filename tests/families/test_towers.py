"""Models of two towers, or with a language model inside: every tower is fused, and pictures keep a say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream

TOLERANCE = 1e-4
"""The promise for float32."""

_TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PICTURE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_TWO: list[tuple[str, dict[str, Any]]] = [
    ("CLIP", {}),
    ("Siglip", {}),
    ("AltCLIP", {"project_dim": 64}),
    ("ChineseCLIP", {}),
]


def _grown(config: Any, model: str) -> Any:
    """A random model whose weights are large enough for errors to show."""
    torch.manual_seed(0)
    made = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return made


def _injected(model: Any) -> Any:
    return slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.float32, replace_with_kernel_inject=True
    )


def _agree(expected: Tensor, got: Tensor) -> None:
    size = max(1.0, float(expected.abs().max()))
    assert float((expected - got).abs().max()) <= TOLERANCE * size


@pytest.mark.parametrize(("prefix", "more"), _TWO, ids=[name for name, _ in _TWO])
def test_both_towers_are_fused_and_agree_on_pairs(prefix: str, more: dict[str, Any]) -> None:
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**_TEXT, **more}, vision_config=_PICTURE, projection_dim=32
    )
    original = _grown(config, f"{prefix}Model")
    engine = _injected(original)
    ids = torch.randint(3, 128, (3, 7), generator=torch.Generator().manual_seed(1))
    ids[:, -1] = 2
    mask = torch.ones_like(ids)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        given = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
        expected, got = original(**given), engine(**given)
    _agree(expected.logits_per_image, got.logits_per_image)
    _agree(expected.text_embeds, got.text_embeds)
    levels = {layer.family: layer.level for layer in engine.report().layers}
    assert set(levels.values()) == {"block"}, str(engine.report())
    assert len(levels) in (1, 2)
