"""Swin v2: Swin with norms after branches, cosine attention, and a bias computed by a small network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.families.family import Config, Family, Heads, OwnAttention, Tiny
from slipstream.families.swin import (
    SWIN_RECIPES,
    SWIN_TINY,
    enter_windows,
    parts_mask,
    swin_layer,
    window_wise,
)
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Take


def _measure(layer: Any, config: Config) -> BlockSpec:
    return replace(swin_layer(layer, config), scale=1.0)


def _attend(
    heads: Heads, layer: Any, given: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    return (window_wise(heads, layer, given["input_dimensions"], (q, k, v), _bias, _turned),)


def _turned(layer: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise queries and keys `(N, H, L, D)` to length one, and scale queries by each head's factor."""
    scale = layer.attention.self.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp()
    q, k = (rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-12) for rows in (q, k))
    return q * scale, k


def _bias(layer: Any, size: tuple[int, int], like: Tensor) -> Tensor:
    own, mask = layer.attention.self, parts_mask(layer, size, like, takes_device=False)
    table = own.continuous_position_bias_mlp(own.relative_coords_table).view(-1, own.num_attention_heads)
    rows = table[own.relative_position_index.flatten()].view(*own.relative_position_index.shape, -1)
    bias: Tensor = 16 * rows.permute(2, 0, 1)[None].sigmoid()
    # The original adds the mask twice.
    return bias if mask is None else bias + 2 * mask[:, None]


def _tiny(label: str = "", **options: Any) -> Tiny:
    return Tiny("Swinv2ForImageClassification", "Swinv2Config", {**SWIN_TINY, **options}, label)


FAMILY = Family(
    name="swinv2",
    layers=("Swinv2Layer",),
    spec=lambda config, index: _measure(None, config),
    measure=_measure,
    recipes={
        **{role: recipe for role, recipe in SWIN_RECIPES.items() if not role.endswith("norm")},
        Role.ATTN_POST_NORM: Take("layernorm_before"),
        Role.MLP_POST_NORM: Take("layernorm_after"),
    },
    ignored=("*.logit_scale", "*.continuous_position_bias_mlp.*"),
    attention=OwnAttention(_attend, frozenset({"input_dimensions"}), enter=enter_windows),
    tiny=(
        _tiny(),
        _tiny("filled up", image_size=28, qkv_bias=False, pretrained_window_sizes=[3, 2]),
    ),
)
