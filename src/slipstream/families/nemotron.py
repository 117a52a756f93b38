"""Nemotron: LayerNorm with weights stored minus one, plain squared-ReLU feed-forward, half a head rotary."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Take


def _norm(config: Config) -> Norm:
    return Norm("layer", config.norm_eps, offset=1.0)


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, norm=_norm(config), gated=False)


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=_norm(config))


FAMILY = Family(
    name="nemotron",
    layers=("NemotronDecoderLayer",),
    spec=_spec,
    recipes={**LLAMA_RECIPES, Role.MLP_IN: Take("mlp.up_proj")},
    frame=_frame,
    tiny=(
        tiny("NemotronForCausalLM", "NemotronConfig"),
        tiny(
            "NemotronForCausalLM",
            "NemotronConfig",
            label="wide heads, biases",
            head_dim=24,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
)
