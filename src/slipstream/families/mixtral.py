"""Mixtral: a llama-like layer whose feed-forward is a mixture of experts."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE


def _spec(config: Config, index: int) -> BlockSpec:
    moe = MoE(config.num_local_experts, config.num_experts_per_tok, normalize=True)
    return llama_like(config, index, moe=moe, window=config.sliding_window)


_TINY: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILY = Family(
    name="mixtral",
    layers=("MixtralDecoderLayer",),
    spec=_spec,
    recipes=MOE_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("MixtralForCausalLM", "MixtralConfig", **_TINY),
        tiny("MixtralForCausalLM", "MixtralConfig", label="sliding", sliding_window=5, **_TINY),
    ),
)
