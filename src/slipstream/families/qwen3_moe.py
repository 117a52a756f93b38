"""Qwen3-MoE: Qwen2-MoE without the shared expert, queries and keys normalised per head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_frame, llama_like, sparse_layer, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    dense = llama_like(
        config, index, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)), window=config.sliding_window
    )
    if not sparse_layer(config, index):
        return dense
    moe = MoE(config.num_experts, config.num_experts_per_tok, normalize=config.norm_topk_prob)
    return replace(dense, ffn=config.moe_intermediate_size, moe=moe)


_TINY: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 24,
}
_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}

FAMILY = Family(
    name="qwen3_moe",
    layers=("Qwen3MoeDecoderLayer",),
    spec=_spec,
    recipes={
        **MOE_RECIPES,
        Role.Q_NORM: Take("self_attn.q_norm"),
        Role.K_NORM: Take("self_attn.k_norm"),
    },
    frame=llama_frame,
    tiny=(
        tiny("Qwen3MoeForCausalLM", "Qwen3MoeConfig", norm_topk_prob=True, **_TINY),
        tiny(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            label="biases, one dense",
            attention_bias=True,
            mlp_only_layers=[1],
            **_TINY,
        ),
        tiny("Qwen3MoeForCausalLM", "Qwen3MoeConfig", label="sliding", **_SLIDING, **_TINY),
    ),
)
