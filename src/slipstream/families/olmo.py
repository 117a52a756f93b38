"""OLMo: llama with LayerNorms that have no weight, and queries, keys and values clipped as an option."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Unit

_NORM = Norm("layer", 1e-5)


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, norm=_NORM, clip_qkv=config.clip_qkv)


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=_NORM)


FAMILY = Family(
    name="olmo",
    layers=("OlmoDecoderLayer",),
    spec=_spec,
    recipes={**LLAMA_RECIPES, Role.ATTN_NORM: Unit(), Role.MLP_NORM: Unit()},
    frame=_frame,
    tiny=(
        tiny("OlmoForCausalLM", "OlmoConfig"),
        tiny("OlmoForCausalLM", "OlmoConfig", label="clipped, biases", clip_qkv=0.4, attention_bias=True),
    ),
)
