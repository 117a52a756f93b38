"""OLMo 2 and 3: norms after the branches, not before; q and k normalised whole; 3 has windowed layers."""

from __future__ import annotations

from slipstream.families.common import (
    POST_NORM_RECIPES,
    QK_NORMS,
    layer_type,
    llama_frame,
    llama_like,
    llama_windowed,
    rope,
    tiny,
)
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm


def _olmo2(config: Config, index: int) -> BlockSpec:
    qk_norm = QKNorm(Norm("rms", config.rms_norm_eps), over="all")
    return llama_like(config, index, qk_norm=qk_norm)


def _olmo3(config: Config, index: int) -> BlockSpec:
    qk_norm = QKNorm(Norm("rms", config.rms_norm_eps), over="all")
    angles = rope(config, layer_type=layer_type(config, index))
    return llama_windowed(config, index, qk_norm=qk_norm, rope=angles)


_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_YARN = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    },
}

FAMILIES = (
    Family(
        name="olmo2",
        layers=("Olmo2DecoderLayer",),
        spec=_olmo2,
        recipes={**POST_NORM_RECIPES, **QK_NORMS},
        frame=llama_frame,
        tiny=(
            tiny("Olmo2ForCausalLM", "Olmo2Config"),
            tiny("Olmo2ForCausalLM", "Olmo2Config", label="biases", attention_bias=True),
        ),
    ),
    Family(
        name="olmo3",
        layers=("Olmo3DecoderLayer",),
        spec=_olmo3,
        recipes={**POST_NORM_RECIPES, **QK_NORMS},
        frame=llama_frame,
        tiny=(
            tiny("Olmo3ForCausalLM", "Olmo3Config", sliding_window=5, layer_types=_TYPES),
            tiny(
                "Olmo3ForCausalLM",
                "Olmo3Config",
                label="yarn where there is no window",
                sliding_window=5,
                layer_types=_TYPES,
                rope_parameters=_YARN,
            ),
        ),
    ),
)
