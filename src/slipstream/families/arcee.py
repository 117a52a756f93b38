"""Arcee and Jais 2: llama with a plain feed-forward of squared ReLU; Jais 2 with LayerNorm and biases."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Take


def _arcee(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, gated=False)


def _jais2(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, norm=Norm("layer", config.layer_norm_eps), gated=False)


def _jais2_frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=Norm("layer", config.layer_norm_eps))


_RECIPES = {**LLAMA_RECIPES, Role.MLP_IN: Take("mlp.up_proj")}

FAMILIES = (
    Family(
        name="arcee",
        layers=("ArceeDecoderLayer",),
        spec=_arcee,
        recipes=_RECIPES,
        frame=llama_frame,
        tiny=(
            tiny("ArceeForCausalLM", "ArceeConfig"),
            tiny("ArceeForCausalLM", "ArceeConfig", label="biases", attention_bias=True, mlp_bias=True),
        ),
    ),
    Family(
        name="jais2",
        layers=("Jais2DecoderLayer",),
        spec=_jais2,
        recipes=_RECIPES,
        frame=_jais2_frame,
        tiny=(tiny("Jais2ForCausalLM", "Jais2Config"),),
    ),
)
