"""Qwen3: llama with q and k normalised per head, and an optional sliding window in the upper layers."""

from __future__ import annotations

from dataclasses import replace

from slipstream.families.common import LLAMA_RECIPES, QK_NORMS, llama_frame, llama_windowed, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm

_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_windowed(config, index, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)))


def _seeing(config: Config, index: int) -> BlockSpec:
    # Qwen3-VL's text model has no windows, whatever its config says.
    return replace(_spec(config, index), window=None)


FAMILY = Family(
    name="qwen3",
    layers=("Qwen3DecoderLayer", "Qwen3VLTextDecoderLayer"),
    spec=_spec,
    specs={"Qwen3VLTextDecoderLayer": _seeing},
    recipes={**LLAMA_RECIPES, **QK_NORMS},
    frame=llama_frame,
    tiny=(
        tiny("Qwen3ForCausalLM", "Qwen3Config", head_dim=24),
        tiny(
            "Qwen3ForCausalLM",
            "Qwen3Config",
            label="window, biases",
            head_dim=16,
            attention_bias=True,
            **_WINDOW,
        ),
    ),
)
