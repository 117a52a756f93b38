"""Ministral 3: Mistral's layer, with a query scale that grows with the position."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Growth


def _spec(config: Config, index: int) -> BlockSpec:
    angles = config.rope_parameters
    growth = Growth(float(angles["llama_4_scaling_beta"]), angles["original_max_position_embeddings"])
    return llama_like(config, index, window=config.sliding_window, growth=growth)


def _refuse(config: Config) -> str | None:
    missing = config.rope_parameters.get("llama_4_scaling_beta") is None
    return "rope_parameters has no llama_4_scaling_beta" if missing else None


_ANGLES: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 5,
    "max_position_embeddings": 80,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}

FAMILY = Family(
    name="ministral3",
    layers=("Ministral3DecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    refuse=_refuse,
    tiny=(
        tiny("Ministral3ForCausalLM", "Ministral3Config", head_dim=24, rope_parameters=_ANGLES),
        tiny(
            "Ministral3ForCausalLM",
            "Ministral3Config",
            label="window",
            head_dim=16,
            sliding_window=5,
            rope_parameters=_ANGLES,
        ),
    ),
)
