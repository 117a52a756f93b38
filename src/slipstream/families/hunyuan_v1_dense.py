"""Hunyuan, dense: llama with queries and keys normalised per head after they were rotated."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    qk_norm = QKNorm(Norm("rms", config.rms_norm_eps), after_rope=True)
    return llama_like(config, index, qk_norm=qk_norm)


_NTK = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

FAMILY = Family(
    name="hunyuan_v1_dense",
    layers=("HunYuanDenseV1DecoderLayer",),
    spec=_spec,
    recipes={
        **LLAMA_RECIPES,
        Role.Q_NORM: Take("self_attn.query_layernorm"),
        Role.K_NORM: Take("self_attn.key_layernorm"),
    },
    frame=llama_frame,
    tiny=(
        tiny("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", head_dim=16),
        tiny(
            "HunYuanDenseV1ForCausalLM",
            "HunYuanDenseV1Config",
            label="scaled angles, biases",
            head_dim=24,
            attention_bias=True,
            rope_parameters=_NTK,
        ),
    ),
)
