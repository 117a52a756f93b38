"""Granite with sinks and windows, dense and with experts; each layer has its own rope theta, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import (
    LLAMA_RECIPES,
    MOE_RECIPES,
    llama_frame,
    llama_windowed,
    rope,
    tiny,
)
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, MoE, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    theta = config.layer_rope_theta[index]
    return llama_windowed(
        config,
        index,
        scale=float(config.attention_multiplier),
        residual_scale=float(config.residual_multiplier),
        sinks=True,
        rope=rope(config, layer_type=str(theta)) if theta else None,
    )


def _frame(config: Config) -> FrameSpec:
    # One module for each theta, in ascending order; `model.rotary_emb` is not used.
    thetas = sorted({theta for theta in config.layer_rope_theta if theta})
    return llama_frame(
        config,
        rotary=None,
        rotaries=tuple((str(theta), f"model.rotary_embs.{i}") for i, theta in enumerate(thetas)),
        embed_scale=float(config.embedding_multiplier),
        logit_scale=1 / config.logits_scaling,
    )


def _sparse(config: Config, index: int) -> BlockSpec:
    moe = MoE(
        config.num_local_experts,
        config.num_experts_per_tok,
        scoring="topk_softmax",
        shared=config.shared_intermediate_size,
    )
    return replace(_spec(config, index), moe=moe)


_SINKS = {Role.SINKS: Take("self_attn.sinks")}
_TINY: dict[str, Any] = {
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_THETAS: dict[str, Any] = {"layer_rope_theta": [1e4, 0.0, 5e2]}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES = (
    Family(
        name="granite_swa",
        layers=("GraniteSWADecoderLayer",),
        spec=_spec,
        frame=_frame,
        recipes={**LLAMA_RECIPES, **_SINKS},
        tiny=(
            tiny("GraniteSWAForCausalLM", "GraniteSWAConfig", **_TINY),
            tiny("GraniteSWAForCausalLM", "GraniteSWAConfig", label="thetas", **_TINY, **_THETAS),
        ),
    ),
    Family(
        name="granitemoe_swa",
        layers=("GraniteMoeSWADecoderLayer",),
        spec=_sparse,
        frame=_frame,
        recipes={
            **MOE_RECIPES,
            **_SINKS,
            Role.ROUTER: Take("block_sparse_moe.router"),
            Role.EXPERTS_IN: Take("block_sparse_moe.experts.gate_up_proj"),
            Role.EXPERTS_OUT: Take("block_sparse_moe.experts.down_proj"),
            Role.SHARED_IN: Take("shared_mlp.input_linear"),
            Role.SHARED_OUT: Take("shared_mlp.output_linear"),
        },
        tiny=(
            tiny("GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig", **_TINY, **_EXPERTS),
            tiny(
                "GraniteMoeSWAForCausalLM",
                "GraniteMoeSWAConfig",
                label="one shared",
                shared_intermediate_size=40,
                **_TINY,
                **_EXPERTS,
            ),
        ),
    ),
)
