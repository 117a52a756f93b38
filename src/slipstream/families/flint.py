"""Flint: sinks, normalised heads, rotary only in windowed layers, sigmoid-scored and shared experts."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import (
    MOE_RECIPES,
    QK_NORMS,
    llama_frame,
    rope,
    sparse_layer,
    tiny,
    window,
)
from slipstream.families.experts import GATED_SHARED, normed_like
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    size = window(config, index)
    return normed_like(
        config,
        index,
        sparse=sparse_layer(config, index),
        changes={"window": size, "sinks": True, "rope": None if size is None else rope(config)},
        scoring="sigmoid",
        exact=True,
        shared=config.shared_expert_intermediate_size,
    )


_TINY: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FAMILY = Family(
    name="flint",
    layers=("FlintDecoderLayer",),
    spec=_spec,
    recipes={
        **MOE_RECIPES,
        **QK_NORMS,
        Role.SINKS: Take("self_attn.sinks"),
        **GATED_SHARED,
    },
    frame=llama_frame,
    tiny=(
        tiny("FlintForCausalLM", "FlintConfig", **_TINY),
        tiny("FlintForCausalLM", "FlintConfig", label="first dense", mlp_only_layers=[0], **_TINY),
    ),
)
