"""Laguna: a number of heads per layer, a softplus gate after attention, experts scored by sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import layer_type, llama_frame, llama_windowed, tiny
from slipstream.families.experts import CORRECTED, corrected_moe, is_sparse
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Gate, Norm, QKNorm, Role, Rope
from slipstream.weights.recipe import Stack


def _rope(config: Config, index: int) -> Rope:
    kind = layer_type(config, index)
    parameters = config.rope_parameters[kind]
    return Rope(int(config.head_dim * parameters.get("partial_rotary_factor", 1.0)), layer_type=kind)


def _spec(config: Config, index: int) -> BlockSpec:
    by_head = config.gating is True or config.gating == "per-head"
    dense = llama_windowed(
        config,
        index,
        heads=config.num_attention_heads_per_layer[index],
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)),
        gate=Gate("softplus", "head" if by_head else "channel"),
        rope=_rope(config, index),
    )
    if not is_sparse(config, index):
        return dense
    moe = corrected_moe(
        config,
        normalize=True,
        groups=1,
        top_groups=1,
        factor=float(config.moe_routed_scaling_factor),
        exact=False,
        more_sum=0.0,
        shared=config.shared_expert_intermediate_size,
    )
    return replace(dense, ffn=config.moe_intermediate_size, moe=moe)


def _refuse(config: Config) -> str | None:
    capped = config.moe_router_logit_softcapping > 0
    return "moe_router_logit_softcapping is not supported" if capped else None


_TINY: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_attention_heads_per_layer": [4, 6, 4],
}

FAMILY = Family(
    name="laguna",
    layers=("LagunaDecoderLayer",),
    spec=_spec,
    recipes={
        **CORRECTED,
        Role.QKV: Stack(tuple(f"self_attn.{part}_proj" for part in "qkvg")),
    },
    frame=llama_frame,
    refuse=_refuse,
    tiny=(
        tiny("LagunaForCausalLM", "LagunaConfig", **_TINY),
        tiny(
            "LagunaForCausalLM",
            "LagunaConfig",
            label="gates by channel, scaled",
            gating="per-element",
            moe_routed_scaling_factor=2.5,
            **_TINY,
        ),
    ),
)
