"""OLMoE: queries and keys normalised over the whole projection, then clipped."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(
        config,
        index,
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps), over="all"),
        clip_qkv=config.clip_qkv,
        moe=MoE(config.num_experts, config.num_experts_per_tok, normalize=config.norm_topk_prob),
    )


_TINY: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

FAMILY = Family(
    name="olmoe",
    layers=("OlmoeDecoderLayer",),
    spec=_spec,
    recipes={
        **MOE_RECIPES,
        Role.Q_NORM: Take("self_attn.q_norm"),
        Role.K_NORM: Take("self_attn.k_norm"),
    },
    frame=llama_frame,
    tiny=(
        tiny("OlmoeForCausalLM", "OlmoeConfig", **_TINY),
        tiny(
            "OlmoeForCausalLM",
            "OlmoeConfig",
            label="clipped, normalised",
            clip_qkv=0.5,
            norm_topk_prob=True,
            **_TINY,
        ),
        tiny("OlmoeForCausalLM", "OlmoeConfig", label="biases", attention_bias=True, **_TINY),
    ),
)
