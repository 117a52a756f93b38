"""OLMo Hybrid: OLMo 2's layers, and between them layers with a gated delta net, which is not fused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import (
    LLAMA_RECIPES,
    POST_NORM_RECIPES,
    QK_NORMS,
    llama_like,
    own_mixer,
    tiny,
)
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm

_LINEAR = "linear attention"


def _attending(config: Config, index: int) -> BlockSpec:
    spec = llama_like(config, index, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps), over="all"))
    rotates = config.rope_parameters is not None and config.rope_parameters.get("rope_theta") is not None
    return spec if rotates else replace(spec, rope=None)


def _linear(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, mixer=_LINEAR, rope=None)


_TINY: dict[str, Any] = {
    "linear_key_head_dim": 16,
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
        recipes={**POST_NORM_RECIPES, **QK_NORMS},
        tiny=(
            tiny("OlmoHybridForCausalLM", "OlmoHybridConfig", **_TINY),
            tiny(
                "OlmoHybridForCausalLM",
                "OlmoHybridConfig",
                label="rotary",
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                **_TINY,
            ),
        ),
    ),
    Family(
        name="olmo_hybrid linear",
        layers=("OlmoHybridLinearAttentionDecoderLayer",),
        spec=_linear,
        recipes=LLAMA_RECIPES,
        mixers={_LINEAR: own_mixer("linear_attn")},
        tiny=(tiny("OlmoHybridForCausalLM", "OlmoHybridConfig", **_TINY),),
    ),
)
