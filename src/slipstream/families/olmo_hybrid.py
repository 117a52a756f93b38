"""OLMo Hybrid: OLMo 2's layers, and between them layers with a gated delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import (
    LLAMA_RECIPES,
    POST_NORM_RECIPES,
    QK_NORMS,
    llama_frame,
    llama_like,
    own_mixer,
    tiny,
)
from slipstream.families.family import Config, Family
from slipstream.families.recurrences import DELTA_APART, delta_rule
from slipstream.spec import BlockSpec, FrameSpec, Norm, QKNorm

_LINEAR = "linear attention"


def _attending(config: Config, index: int) -> BlockSpec:
    spec = llama_like(config, index, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps), over="all"))
    return spec if _rotates(config) else replace(spec, rope=None)


def _rotates(config: Config) -> bool:
    return config.rope_parameters is not None and config.rope_parameters.get("rope_theta") is not None


def _linear(config: Config, index: int) -> BlockSpec:
    recurrence = delta_rule(config, by_head=False)
    if recurrence is not None:
        scale = 2.0 if config.linear_allow_neg_eigval else 1.0
        # The norm of the output has its own epsilon.
        recurrence = replace(recurrence, rate_scale=scale, norm=Norm("rms", 1e-5))
    return llama_like(config, index, mixer=_LINEAR, recurrence=recurrence, rope=None)


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, rotary="model.rotary_emb" if _rotates(config) else None)


_TINY: dict[str, Any] = {
    # Keys are divided by their norm: with fewer dims it may be small, which amplifies rounding errors.
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

FAMILIES = (
    Family(
        name="olmo_hybrid",
        layers=("OlmoHybridAttentionDecoderLayer",),
        spec=_attending,
        frame=_frame,
        recipes={**POST_NORM_RECIPES, **QK_NORMS},
        tiny=(
            tiny("OlmoHybridForCausalLM", "OlmoHybridConfig", **_TINY),
            tiny(
                "OlmoHybridForCausalLM",
                "OlmoHybridConfig",
                label="rotary",
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                linear_allow_neg_eigval=False,
                **_TINY,
            ),
        ),
    ),
    Family(
        name="olmo_hybrid linear",
        layers=("OlmoHybridLinearAttentionDecoderLayer",),
        spec=_linear,
        frame=_frame,
        recipes=LLAMA_RECIPES,
        mixers={_LINEAR: own_mixer("linear_attn", recurrent=DELTA_APART)},
        tiny=(tiny("OlmoHybridForCausalLM", "OlmoHybridConfig", **_TINY),),
    ),
)
