"""Ministral: Mistral with a sliding window in some of the layers."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_windowed, tiny
from slipstream.families.family import Family

_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILY = Family(
    name="ministral",
    layers=("MinistralDecoderLayer",),
    spec=llama_windowed,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("MinistralForCausalLM", "MinistralConfig", head_dim=16, sliding_window=5, layer_types=_TYPES),
        tiny(
            "MinistralForCausalLM",
            "MinistralConfig",
            label="windows throughout",
            head_dim=24,
            sliding_window=5,
        ),
    ),
)
