"""Llama 4's language model: non-rotary layers with growing query scales, experts with weighted input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Growth, MoE, Norm, QKNorm, Role
from slipstream.weights.recipe import Conv1D, Stack, Take, Unit


def _spec(config: Config, index: int) -> BlockSpec:
    norm = Norm("rms", config.rms_norm_eps)
    rotates = bool(config.no_rope_layers[index])
    chunked = config.layer_types[index] == "chunked_attention"
    grows = config.attn_temperature_tuning and not rotates
    dense = llama_like(
        config,
        index,
        ffn=config.intermediate_size_mlp,
        qk_norm=QKNorm(norm, after_rope=True) if config.use_qk_norm and rotates else None,
        chunk=config.attention_chunk_size if chunked else None,
        rope=rope(config, interleaved=True, table="half") if rotates else None,
        # Positions are counted in the cache, padding included.
        growth=Growth(config.attn_scale, config.floor_scale, offset=1, padded=True) if grows else None,
    )
    if index not in config.moe_layers:
        return dense
    moe = MoE(
        config.num_local_experts,
        config.num_experts_per_tok,
        scoring="topk_sigmoid",
        shared=config.intermediate_size,
        weighs_input=True,
    )
    return replace(dense, ffn=config.intermediate_size, moe=moe)


_TINY: dict[str, Any] = {
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 4,
    "attention_chunk_size": 6,
}

FAMILY = Family(
    name="llama4_text",
    layers=("Llama4TextDecoderLayer",),
    spec=_spec,
    frame=llama_frame,
    recipes={
        **LLAMA_RECIPES,
        Role.Q_NORM: Unit(),
        Role.K_NORM: Unit(),
        Role.MLP_IN: Stack(("feed_forward.gate_proj", "feed_forward.up_proj")),
        Role.MLP_OUT: Take("feed_forward.down_proj"),
        Role.ROUTER: Take("feed_forward.router"),
        Role.EXPERTS_IN: Conv1D("feed_forward.experts.gate_up_proj"),
        Role.EXPERTS_OUT: Conv1D("feed_forward.experts.down_proj"),
        Role.SHARED_IN: Stack(("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj")),
        Role.SHARED_OUT: Take("feed_forward.shared_expert.down_proj"),
    },
    tiny=(
        tiny("Llama4ForCausalLM", "Llama4TextConfig", **_TINY),
        tiny(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            label="two experts, plain heads",
            num_experts_per_tok=2,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            **_TINY,
        ),
    ),
)
