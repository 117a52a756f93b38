"""FlexOLMo: OLMo 2's layer with experts."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, POST_NORM_RECIPES, QK_NORMS, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role


def _spec(config: Config, index: int) -> BlockSpec:
    moe = MoE(config.num_experts, config.num_experts_per_tok, normalize=config.norm_topk_prob)
    return llama_like(config, index, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps), over="all"), moe=moe)


_EXPERTS = {role: MOE_RECIPES[role] for role in (Role.ROUTER, Role.EXPERTS_IN, Role.EXPERTS_OUT)}
_TINY: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

FAMILY = Family(
    name="flex_olmo",
    layers=("FlexOlmoDecoderLayer",),
    spec=_spec,
    recipes={**POST_NORM_RECIPES, **QK_NORMS, **_EXPERTS},
    frame=llama_frame,
    tiny=(
        tiny("FlexOlmoForCausalLM", "FlexOlmoConfig", **_TINY),
        tiny("FlexOlmoForCausalLM", "FlexOlmoConfig", label="normalised", norm_topk_prob=True, **_TINY),
    ),
)
