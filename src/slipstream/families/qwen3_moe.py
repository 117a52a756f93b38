"""Qwen3-MoE: Qwen2-MoE without the shared expert, heads normalised; the text of Qwen3-VL-MoE as well."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, QK_NORMS, llama_frame, sparse_layer, tiny
from slipstream.families.experts import normed_like
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec


def _spec(config: Config, index: int) -> BlockSpec:
    changes = {"window": config.sliding_window}
    return normed_like(config, index, sparse=sparse_layer(config, index), changes=changes)


def _seeing(config: Config, index: int) -> BlockSpec:
    sparse = sparse_layer(config, index)
    return normed_like(config, index, sparse=sparse, changes={}, normalize=True)


_TINY: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 24,
}
_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}

FAMILY = Family(
    name="qwen3_moe",
    layers=("Qwen3MoeDecoderLayer", "Qwen3VLMoeTextDecoderLayer"),
    spec=_spec,
    specs={"Qwen3VLMoeTextDecoderLayer": _seeing},
    recipes={
        **MOE_RECIPES,
        **QK_NORMS,
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
