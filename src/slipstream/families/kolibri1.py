"""Kolibri: sandwich norms, rotary in windowed layers only, experts chosen by corrected logits."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import SANDWICH_RECIPES, llama_frame, llama_windowed, rope, tiny, window
from slipstream.families.experts import CORRECTED, corrected_moe
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    size = window(config, index)
    moe = corrected_moe(
        config,
        scoring="topk_sigmoid",
        groups=1,
        top_groups=1,
        factor=1.0,
        more_sum=0.0,
        normalize=bool(config.norm_topk_prob),
        shared=config.shared_expert_intermediate_size,
    )
    return llama_windowed(
        config,
        index,
        window=size,
        rope=rope(config) if config.sliding_window is None or size is not None else None,
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)),
        ffn=config.moe_intermediate_size,
        moe=moe,
    )


_TINY: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FAMILY = Family(
    name="kolibri1",
    layers=("Kolibri1DecoderLayer",),
    spec=_spec,
    recipes={
        **SANDWICH_RECIPES,
        **CORRECTED,
        Role.ATTN_POST_NORM: Take("post_self_attn_layernorm"),
        Role.MLP_NORM: Take("post_attention_layernorm"),
        Role.MLP_POST_NORM: Take("post_mlp_layernorm"),
    },
    frame=llama_frame,
    tiny=(
        tiny("Kolibri1ForCausalLM", "Kolibri1Config", **_TINY),
        tiny("Kolibri1ForCausalLM", "Kolibri1Config", label="normalised", norm_topk_prob=True, **_TINY),
    ),
)
