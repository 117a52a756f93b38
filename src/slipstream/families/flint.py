"""Flint: sinks, normalised heads, only windowed layers rotate, experts by sigmoid beside one for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import (
    MOE_RECIPES,
    QK_NORMS,
    llama_frame,
    llama_windowed,
    rope,
    sparse_layer,
    tiny,
    window,
)
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dense = llama_windowed(
        config,
        index,
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)),
        sinks=True,
        rope=rope(config) if window(config, index) is not None else None,
    )
    if not sparse_layer(config, index):
        return dense
    moe = MoE(
        config.num_experts,
        config.num_experts_per_tok,
        scoring="sigmoid",
        normalize=config.norm_topk_prob,
        exact=True,
        shared=config.shared_expert_intermediate_size,
    )
    return replace(dense, ffn=config.moe_intermediate_size, moe=moe)


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
        Role.SHARED_IN: Stack(("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
        Role.SHARED_OUT: Take("mlp.shared_expert.down_proj"),
    },
    frame=llama_frame,
    tiny=(
        tiny("FlintForCausalLM", "FlintConfig", **_TINY),
        tiny("FlintForCausalLM", "FlintConfig", label="first dense", mlp_only_layers=[0], **_TINY),
    ),
)
