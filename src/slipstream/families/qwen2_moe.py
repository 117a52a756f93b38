"""Qwen2-MoE: routed experts, a shared expert with a gate, and dense layers in between."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_frame, llama_windowed, sparse_layer, tiny
from slipstream.families.experts import GATED_SHARED
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE


def _spec(config: Config, index: int) -> BlockSpec:
    if not sparse_layer(config, index):
        return llama_windowed(config, index)
    moe = MoE(
        config.num_experts,
        config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return llama_windowed(config, index, ffn=config.moe_intermediate_size, moe=moe)


_TINY: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}

FAMILY = Family(
    name="qwen2_moe",
    layers=("Qwen2MoeDecoderLayer",),
    spec=_spec,
    recipes={
        **MOE_RECIPES,
        **GATED_SHARED,
    },
    frame=llama_frame,
    tiny=(
        tiny("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_TINY),
        tiny("Qwen2MoeForCausalLM", "Qwen2MoeConfig", label="normalised", norm_topk_prob=True, **_TINY),
        tiny("Qwen2MoeForCausalLM", "Qwen2MoeConfig", label="every second", decoder_sparse_step=2, **_TINY),
        tiny("Qwen2MoeForCausalLM", "Qwen2MoeConfig", label="first dense", mlp_only_layers=[0], **_TINY),
        tiny(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            label="sliding, no bias",
            qkv_bias=False,
            **_SLIDING,
            **_TINY,
        ),
    ),
)
