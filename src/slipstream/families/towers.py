"""Parts shared by encoders of images and audio: one pre-norm layer under many names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from slipstream.families.common import bert_like, head_dim
from slipstream.families.family import Config, Tiny
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import First, Recipe, Stack, Take

__all__ = ["CLIP_RECIPES", "VIT_RECIPES", "clip_like", "is_text", "picture_tiny", "vit_like"]

VIT_RECIPES: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {
        Role.ATTN_NORM: Take("layernorm_before"),
        Role.QKV: First(
            (
                Stack(tuple(f"attention.{part}_proj" for part in "qkv")),
                Stack(tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))),
            )
        ),
        Role.ATTN_OUT: First((Take("attention.o_proj"), Take("attention.output.dense"))),
        Role.MLP_NORM: Take("layernorm_after"),
        Role.MLP_IN: First((Take("mlp.fc1"), Take("intermediate.dense"))),
        Role.MLP_OUT: First((Take("mlp.fc2"), Take("output.dense"))),
    }
)
"""Recipes of ViT's layer, by its present and earlier names."""

CLIP_RECIPES: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {
        Role.ATTN_NORM: Take("layer_norm1"),
        Role.QKV: Stack(tuple(f"self_attn.{part}_proj" for part in "qkv")),
        Role.ATTN_OUT: Take("self_attn.out_proj"),
        Role.MLP_NORM: Take("layer_norm2"),
        Role.MLP_IN: Take("mlp.fc1"),
        Role.MLP_OUT: Take("mlp.fc2"),
    }
)
"""Recipes of CLIP's layer, for images and text."""


def vit_like(config: Config, index: int, **changes: Any) -> BlockSpec:
    """Return the spec of a ViT-like layer; `changes` replace single fields."""
    dim = head_dim(config)
    return bert_like(config, index, **{"place": "pre", "head_dim": dim, "scale": dim**-0.5, **changes})


def clip_like(config: Config, index: int, **changes: Any) -> BlockSpec:
    """Return the spec of a CLIP-like layer; `changes` replace single fields."""
    return bert_like(config, index, **{"place": "pre", **changes})


def is_text(config: Config) -> bool:
    """Whether the config is a text tower's rather than an image tower's."""
    return not hasattr(config, "patch_size")


def picture_tiny(model: str, config: str, *, label: str = "", **options: Any) -> Tiny:
    """Return a tiny image model with ViT's field names; `options` override or add fields."""
    fields = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    return Tiny(model, config, {**fields, **options}, label)
