"""Trinity (AFMoE): sandwich norms, gated attention, rotary in windowed layers only, corrected experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import SANDWICH_RECIPES, llama_frame, llama_windowed, rope, tiny, window
from slipstream.families.experts import CORRECTED, corrected_moe
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Gate, Norm, QKNorm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dense = llama_windowed(
        config,
        index,
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)),
        gate=Gate(),
        rope=rope(config) if window(config, index) is not None else None,
    )
    if index < config.num_dense_layers:
        return dense
    moe = corrected_moe(
        config,
        normalize=True,
        groups=1,
        top_groups=1,
        factor=config.route_scale,
        exact=False,
    )
    return replace(dense, ffn=config.moe_intermediate_size, moe=moe)


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, embed_scale=config.hidden_size**0.5 if config.mup_enabled else 1.0)


_TINY: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 48,
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FAMILY = Family(
    name="afmoe",
    layers=("AfmoeDecoderLayer",),
    spec=_spec,
    recipes={
        **SANDWICH_RECIPES,
        **CORRECTED,
        Role.QKV: Stack(tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "gate"))),
        Role.ATTN_POST_NORM: Take("post_attention_layernorm"),
        Role.MLP_NORM: Take("pre_mlp_layernorm"),
        Role.MLP_POST_NORM: Take("post_mlp_layernorm"),
        Role.ROUTER: Take("mlp.router.gate"),
        Role.ROUTER_BIAS: Take("mlp.expert_bias"),
    },
    frame=_frame,
    tiny=(
        tiny("AfmoeForCausalLM", "AfmoeConfig", **_TINY),
        tiny(
            "AfmoeForCausalLM",
            "AfmoeConfig",
            label="scaled, two shared, biases",
            mup_enabled=True,
            route_scale=2.5,
            attention_bias=True,
            **{**_TINY, "num_shared_experts": 2},
        ),
    ),
)
