"""Hunyuan, dense and with experts: queries and keys normalised per head after rotary."""

from __future__ import annotations

from dataclasses import replace

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    qk_norm = QKNorm(Norm("rms", config.rms_norm_eps), after_rope=True)
    return llama_like(config, index, qk_norm=qk_norm)


def _of(value: int | list[int], index: int) -> int:
    return value if isinstance(value, int) else value[index]


def _experts(config: Config, index: int) -> BlockSpec:
    moe = MoE(
        _of(config.num_experts, index),
        _of(config.moe_topk, index),
        normalize=True,
        exact=True,
        shared=config.intermediate_size,
    )
    return replace(_spec(config, index), moe=moe)


_NORMED = {
    **LLAMA_RECIPES,
    Role.Q_NORM: Take("self_attn.query_layernorm"),
    Role.K_NORM: Take("self_attn.key_layernorm"),
}
_NTK = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

_DENSE = Family(
    name="hunyuan_v1_dense",
    layers=("HunYuanDenseV1DecoderLayer",),
    spec=_spec,
    recipes=_NORMED,
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
_MIXTURE = Family(
    name="hunyuan_v1_moe",
    layers=("HunYuanMoEV1DecoderLayer",),
    spec=_experts,
    recipes={
        **_NORMED,
        Role.ROUTER: Take("mlp.gate.wg"),
        Role.EXPERTS_IN: Take("mlp.experts.gate_up_proj"),
        Role.EXPERTS_OUT: Take("mlp.experts.down_proj"),
        Role.SHARED_IN: Stack(("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj")),
        Role.SHARED_OUT: Take("mlp.shared_mlp.down_proj"),
    },
    frame=llama_frame,
    tiny=(tiny("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", head_dim=16, num_experts=4, moe_topk=2),),
)

FAMILIES = (_DENSE, _MIXTURE)
