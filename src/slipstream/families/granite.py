"""Granite and HyperCLOVA X: llama with multipliers for the embedding, scores, branches and logits."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    scale, residual = float(config.attention_multiplier), float(config.residual_multiplier)
    return llama_like(config, index, scale=scale, residual_scale=residual)


def _granite_frame(config: Config) -> FrameSpec:
    return llama_frame(
        config, embed_scale=float(config.embedding_multiplier), logit_scale=1.0 / config.logits_scaling
    )


def _hyperclovax_frame(config: Config) -> FrameSpec:
    return llama_frame(
        config, embed_scale=float(config.embedding_multiplier), logit_scale=float(config.logits_scaling)
    )


_TINY: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 8.0,
}

FAMILIES = (
    Family(
        name="granite",
        layers=("GraniteDecoderLayer",),
        spec=_spec,
        recipes=LLAMA_RECIPES,
        frame=_granite_frame,
        tiny=(
            tiny("GraniteForCausalLM", "GraniteConfig", **_TINY),
            tiny(
                "GraniteForCausalLM",
                "GraniteConfig",
                label="biases",
                attention_bias=True,
                mlp_bias=True,
                **_TINY,
            ),
        ),
    ),
    Family(
        name="hyperclovax",
        layers=("HyperCLOVAXDecoderLayer",),
        spec=_spec,
        recipes={
            **LLAMA_RECIPES,
            Role.ATTN_POST_NORM: Take("post_norm1"),
            Role.MLP_POST_NORM: Take("post_norm2"),
        },
        frame=_hyperclovax_frame,
        tiny=(
            tiny("HyperCLOVAXForCausalLM", "HyperCLOVAXConfig", **_TINY),
            tiny(
                "HyperCLOVAXForCausalLM",
                "HyperCLOVAXConfig",
                label="no post norms",
                use_post_norm=False,
                **_TINY,
            ),
        ),
    ),
)
