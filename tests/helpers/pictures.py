"""Tiny models that look at pictures, and what they are asked."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

TEXT: dict[str, Any] = {
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
PICTURE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def grown(config: Any, model: str) -> Any:
    """A random model whose weights are large enough for errors to show."""
    torch.manual_seed(0)
    made = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return made


def idefics(**more: Any) -> Any:
    """A language model that looks at pictures between its layers."""
    config = transformers.IdeficsConfig(
        **TEXT,
        additional_vocab_size=0,
        alpha_initializer="ones",
        vision_config={**PICTURE, "embed_dim": 32},
        perceiver_config={"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2},
        **more,
    )
    return grown(config, "IdeficsForVisionText2Text")


def idefics_asked() -> dict[str, Tensor]:
    """Two padded rows with two pictures each, of which not every token sees both."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 100, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    seen = torch.ones(2, 9, 2, dtype=torch.long)
    seen[:, :5, 1] = seen[1, :3] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 2, 3, 32, 32, generator=generator),
        "image_attention_mask": seen,
    }
