"""Phi-3 and Phi-4: llama with q, k, v in one matrix, gate and up in another, and part of a head rotary.

The decoder of Phi-4-multimodal is the same; its towers are not fused.
"""

from __future__ import annotations

from typing import Any

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, window=config.sliding_window)


def _frame(config: Config) -> FrameSpec:
    long = config.rope_parameters.get("rope_type") == "longrope"
    return llama_frame(config, restart=config.original_max_position_embeddings if long else None)


def _longrope(pairs: int, original: int) -> dict[str, Any]:
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + i for i in range(pairs)],
    }
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


_TOWERS: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 0,
        "image_token_id": 126,
    },
    "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 0, "audio_token_id": 127},
}


def _with_towers(label: str, **options: Any) -> Tiny:
    return tiny("Phi4MultimodalForCausalLM", "Phi4MultimodalConfig", label=label, **{**_TOWERS, **options})


FAMILY = Family(
    name="phi3",
    layers=("Phi3DecoderLayer", "Phi4MultimodalDecoderLayer"),
    spec=_spec,
    recipes={**LLAMA_RECIPES, Role.QKV: Take("self_attn.qkv_proj"), Role.MLP_IN: Take("mlp.gate_up_proj")},
    frame=_frame,
    tiny=(
        tiny("Phi3ForCausalLM", "Phi3Config"),
        tiny(
            "Phi3ForCausalLM",
            "Phi3Config",
            label="window, partial rope",
            sliding_window=5,
            partial_rotary_factor=0.75,
        ),
        tiny(
            "Phi3ForCausalLM", "Phi3Config", label="longrope, beyond the original length", **_longrope(8, 4)
        ),
        tiny(
            "Phi3ForCausalLM", "Phi3Config", label="longrope, within the original length", **_longrope(8, 200)
        ),
        tiny(
            "Phi3ForCausalLM", "Phi3Config", label="longrope, across the original length", **_longrope(8, 15)
        ),
        _with_towers("multimodal, window", sliding_window=5),
        _with_towers("multimodal, across the original length", **_longrope(8, 15)),
    ),
)
