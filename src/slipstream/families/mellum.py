"""Mellum 2: Qwen3-MoE's layer with windows in some layers, which have their own angles."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import (
    MOE_RECIPES,
    QK_NORMS,
    layer_type,
    llama_frame,
    rope,
    tiny,
    window,
)
from slipstream.families.experts import is_sparse, normed_like
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec


def _spec(config: Config, index: int) -> BlockSpec:
    angles = rope(config, layer_type=layer_type(config, index))
    changes = {"window": window(config, index), "rope": angles}
    return normed_like(config, index, sparse=is_sparse(config, index), changes=changes)


_TINY: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FAMILY = Family(
    name="mellum",
    layers=("MellumDecoderLayer",),
    spec=_spec,
    recipes={**MOE_RECIPES, **QK_NORMS},
    frame=llama_frame,
    tiny=(
        tiny("MellumForCausalLM", "MellumConfig", **_TINY),
        tiny(
            "MellumForCausalLM",
            "MellumConfig",
            label="first dense, not normalised",
            mlp_layer_types=["dense", "sparse", "sparse"],
            norm_topk_prob=False,
            **_TINY,
        ),
    ),
)
