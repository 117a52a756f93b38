"""Mistral: llama with one sliding window for all layers."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec


def _spec(config: Config, index: int) -> BlockSpec:
    # The model passes every layer the same mask, whatever `layer_types` a checkpoint has.
    return llama_like(config, index, window=config.sliding_window)


FAMILY = Family(
    name="mistral",
    layers=("MistralDecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("MistralForCausalLM", "MistralConfig", sliding_window=None),
        tiny("MistralForCausalLM", "MistralConfig", label="window", sliding_window=5),
        tiny("MistralForCausalLM", "MistralConfig", label="wide heads", sliding_window=None, head_dim=24),
    ),
)
