"""Cohere 2 with experts: the parallel block of Cohere 2, with experts after the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import MOE_RECIPES, field, llama_frame, llama_windowed, rope, tiny, window
from slipstream.families.experts import SHARED, is_sparse
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, MoE, Norm


def _norm(config: Config) -> Norm:
    if config.rms_norm_eps is not None:
        return Norm("rms", config.rms_norm_eps)
    return Norm("layer", config.layer_norm_eps)


def _spec(config: Config, index: int) -> BlockSpec:
    angles = rope(config, interleaved=True, table="pairs") if window(config, index) else None
    spec = llama_windowed(config, index, norm=_norm(config), parallel=True, rope=angles)
    if not is_sparse(config, index):
        width = field(config, "prefix_dense_intermediate_size", default=config.intermediate_size)
        return replace(spec, ffn=width)
    by_softmax = config.expert_selection_fn == "softmax"
    moe = MoE(
        config.num_experts,
        config.num_experts_per_tok,
        scoring="topk_softmax" if by_softmax else "topk_sigmoid",
        normalize=not by_softmax and config.norm_topk_prob,
        shared=config.intermediate_size * config.num_shared_experts,
    )
    return replace(spec, moe=moe)


def _refuse(config: Config) -> str | None:
    averaged = config.num_shared_experts and config.shared_expert_combination_strategy != "sum"
    return "shared_expert_combination_strategy must be 'sum'" if averaged else None


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=_norm(config), logit_scale=config.logit_scale)


_TINY: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
}

FAMILY = Family(
    name="cohere2_moe",
    layers=("Cohere2MoeDecoderLayer",),
    spec=_spec,
    recipes={**MOE_RECIPES, **SHARED},
    frame=_frame,
    refuse=_refuse,
    tiny=(
        tiny("Cohere2MoeForCausalLM", "Cohere2MoeConfig", **_TINY),
        tiny(
            "Cohere2MoeForCausalLM",
            "Cohere2MoeConfig",
            label="sigmoid, one shared, first dense",
            expert_selection_fn="sigmoid",
            num_shared_experts=1,
            shared_expert_combination_strategy="sum",
            mlp_layer_types=["dense", "sparse", "sparse"],
            **_TINY,
        ),
    ),
)
