"""PhiMoE: two experts chosen one after the other, LayerNorms with bias, and an optional bias in the head."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, MoE, Norm, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    # The original's router always chooses two, whatever `num_experts_per_tok` is.
    moe = MoE(config.num_local_experts, 2, scoring="sparsemixer", jitter=config.router_jitter_noise)
    norm = Norm("layer", config.rms_norm_eps)
    return llama_like(config, index, norm=norm, moe=moe, window=config.sliding_window)


def _frame(config: Config) -> FrameSpec:
    long = config.rope_parameters["rope_type"] == "longrope"
    restart = config.original_max_position_embeddings if long else None
    return llama_frame(config, norm=Norm("layer", config.rms_norm_eps), restart=restart)


_TINY: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7],
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 15,
}

FAMILY = Family(
    name="phimoe",
    layers=("PhimoeDecoderLayer",),
    spec=_spec,
    recipes={**MOE_RECIPES, Role.ROUTER: Take("mlp.router")},
    frame=_frame,
    tiny=(
        tiny("PhimoeForCausalLM", "PhimoeConfig", **_TINY),
        tiny(
            "PhimoeForCausalLM",
            "PhimoeConfig",
            label="biases",
            attention_bias=True,
            lm_head_bias=True,
            **_TINY,
        ),
        tiny("PhimoeForCausalLM", "PhimoeConfig", label="wide threshold", router_jitter_noise=0.4, **_TINY),
        tiny(
            "PhimoeForCausalLM",
            "PhimoeConfig",
            label="sliding, across the original length",
            sliding_window=5,
            rope_parameters=_LONG,
            **_TINY,
        ),
    ),
)
