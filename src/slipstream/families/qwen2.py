"""Qwen2 and Qwen2.5: llama with biases on q, k, v, and an optional sliding window in the upper layers."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_windowed, tiny
from slipstream.families.family import Family

_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

FAMILY = Family(
    name="qwen2",
    layers=("Qwen2DecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"),
    spec=llama_windowed,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("Qwen2ForCausalLM", "Qwen2Config"),
        tiny(
            "Qwen2ForCausalLM",
            "Qwen2Config",
            label="window in upper layers, tied",
            tie_word_embeddings=True,
            **_WINDOW,
        ),
    ),
)
