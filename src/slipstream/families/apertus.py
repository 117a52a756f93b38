"""Apertus: queries and keys normalised per head, no gate, an activation that is learned."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, QK_NORMS, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, gated=False, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)))


FAMILY = Family(
    name="apertus",
    layers=("ApertusDecoderLayer",),
    spec=_spec,
    recipes={
        **LLAMA_RECIPES,
        **QK_NORMS,
        Role.ATTN_NORM: Take("attention_layernorm"),
        Role.MLP_NORM: Take("feedforward_layernorm"),
        Role.MLP_IN: Take("mlp.up_proj"),
        Role.ACTIVATION: Stack(("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")),
    },
    frame=llama_frame,
    tiny=(
        tiny("ApertusForCausalLM", "ApertusConfig"),
        tiny(
            "ApertusForCausalLM",
            "ApertusConfig",
            label="another activation, biases",
            hidden_act="relu2",
            attention_bias=True,
        ),
    ),
)
