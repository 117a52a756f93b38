"""ERNIE 4.5 with experts: softmax scores, a correction for the choice, a minimum sum, shared experts."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_frame, llama_like, rope, tiny
from slipstream.families.experts import SHARED
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    angles = rope(config, interleaved=True)
    layer, first, last = index + 1, config.moe_layer_start_index, config.moe_layer_end_index
    if layer % config.moe_layer_interval or not first <= index <= last:
        return llama_like(config, index, rope=angles)
    moe = MoE(
        config.moe_num_experts,
        config.moe_k,
        normalize=True,
        least_sum=float(config.moe_norm_min),
        exact=True,
        shared=config.moe_intermediate_size * config.moe_num_shared_experts,
    )
    return llama_like(config, index, rope=angles, ffn=config.moe_intermediate_size, moe=moe)


_TINY: dict[str, Any] = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48}

FAMILY = Family(
    name="ernie4_5_moe",
    layers=("Ernie4_5_MoeDecoderLayer",),
    spec=_spec,
    recipes={
        **MOE_RECIPES,
        **SHARED,
        Role.ROUTER_BIAS: Take("mlp.gate.moe_statics.e_score_correction_bias"),
    },
    frame=llama_frame,
    tiny=(
        tiny("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", **_TINY),
        tiny(
            "Ernie4_5_MoeForCausalLM",
            "Ernie4_5_MoeConfig",
            label="none shared, every second",
            moe_num_shared_experts=0,
            moe_layer_interval=2,
            moe_norm_min=0.6,
            **_TINY,
        ),
    ),
)
