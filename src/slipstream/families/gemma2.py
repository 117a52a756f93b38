"""Gemma 2 and VaultGemma: Gemma with capped scores and logits, alternating windows; 2 has sandwich norms."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import LLAMA_RECIPES, SANDWICH_RECIPES, llama_frame, llama_windowed, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Take


def _norm(config: Config) -> Norm:
    return Norm("rms", config.rms_norm_eps, offset=1.0)


def _bidirectional(config: Config) -> bool:
    return bool(getattr(config, "use_bidirectional_attention", False))


def _spec(config: Config, index: int) -> BlockSpec:
    # PaliGemma 2 passes the masks, windows included, which make the prompt bidirectional.
    whole: dict[str, Any] = {"causal": False, "window": None} if _bidirectional(config) else {}
    # Versions of transformers that run this model with "sdpa" omit the softcap of scores in that case.
    return llama_windowed(
        config,
        index,
        norm=_norm(config),
        activation=config.hidden_activation,
        scale=config.query_pre_attn_scalar**-0.5,
        softcap=None if config._attn_implementation == "sdpa" else config.attn_logit_softcapping,
        **whole,
    )


def _frame(config: Config) -> FrameSpec | None:
    if _bidirectional(config):
        return None
    return llama_frame(
        config,
        norm=_norm(config),
        embed_scale=config.hidden_size**0.5,
        embed_scale_rounded=True,
        logit_softcap=config.final_logit_softcapping,
    )


_TINY: dict[str, Any] = {"head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 20}
# Caps that are low enough to take effect on values from random weights.
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
_NO_CAPS: dict[str, Any] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}

FAMILIES = (
    Family(
        name="gemma2",
        layers=("Gemma2DecoderLayer",),
        spec=_spec,
        recipes=SANDWICH_RECIPES,
        frame=_frame,
        tiny=(
            tiny("Gemma2ForCausalLM", "Gemma2Config", **_TINY, **_CAPS),
            tiny(
                "Gemma2ForCausalLM",
                "Gemma2Config",
                label="eager",
                attn_implementation="eager",
                **_TINY,
                **_CAPS,
            ),
            tiny(
                "Gemma2ForCausalLM",
                "Gemma2Config",
                label="no caps, biases",
                attention_bias=True,
                **_TINY,
                **_NO_CAPS,
            ),
            tiny(
                "Gemma2ForCausalLM",
                "Gemma2Config",
                label="bidirectional",
                use_bidirectional_attention=True,
                **_TINY,
                **_CAPS,
            ),
        ),
    ),
    Family(
        name="vaultgemma",
        layers=("VaultGemmaDecoderLayer",),
        spec=_spec,
        recipes={**LLAMA_RECIPES, Role.MLP_NORM: Take("pre_feedforward_layernorm")},
        frame=_frame,
        tiny=(tiny("VaultGemmaForCausalLM", "VaultGemmaConfig", **_TINY, **_CAPS),),
    ),
)
