"""StarCoder2: LayerNorm, a plain feed-forward, biases throughout, and an optional sliding window."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    norm = Norm("layer", config.norm_epsilon)
    return llama_like(config, index, norm=norm, gated=False, window=config.sliding_window)


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=Norm("layer", config.norm_epsilon))


FAMILY = Family(
    name="starcoder2",
    layers=("Starcoder2DecoderLayer",),
    spec=_spec,
    recipes={**LLAMA_RECIPES, Role.MLP_IN: Take("mlp.c_fc"), Role.MLP_OUT: Take("mlp.c_proj")},
    frame=_frame,
    tiny=(
        tiny("Starcoder2ForCausalLM", "Starcoder2Config"),
        tiny(
            "Starcoder2ForCausalLM",
            "Starcoder2Config",
            label="window, no biases",
            sliding_window=5,
            use_bias=False,
        ),
    ),
)
