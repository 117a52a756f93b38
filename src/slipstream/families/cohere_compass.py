"""Cohere Compass's language model: Cohere 2's layer, rotary if the type of layer has angles."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import LLAMA_RECIPES, layer_type, llama_windowed, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm


def _spec(config: Config, index: int) -> BlockSpec:
    kind = layer_type(config, index)
    rotates = config.rope_parameters[kind] is not None
    return llama_windowed(
        config,
        index,
        norm=Norm("layer", config.layer_norm_eps),
        parallel=True,
        rope=rope(config, layer_type=kind) if rotates else None,
    )


_ANGLES: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

FAMILY = Family(
    name="cohere_compass_text",
    layers=("CohereCompassDecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    tiny=(
        tiny(
            "CohereCompassForCausalLM",
            "CohereCompassTextConfig",
            sliding_window=5,
            rope_parameters={"sliding_attention": _ANGLES, "full_attention": None},
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
)
