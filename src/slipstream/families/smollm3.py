"""SmolLM3: llama with some layers that are not rotary, and an optional sliding window."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_windowed, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_windowed(config, index, rope=rope(config) if config.no_rope_layers[index] else None)


_TINY: dict[str, Any] = {"no_rope_layer_interval": 2}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}

FAMILY = Family(
    name="smollm3",
    layers=("SmolLM3DecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("SmolLM3ForCausalLM", "SmolLM3Config", **_TINY),
        tiny(
            "SmolLM3ForCausalLM",
            "SmolLM3Config",
            label="window, biases",
            attention_bias=True,
            mlp_bias=True,
            **_TINY,
            **_WINDOW,
        ),
    ),
)
