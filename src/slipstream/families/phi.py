"""Phi 1, 1.5 and 2: one norm for both branches, biases everywhere, part of each head rotary."""

from __future__ import annotations

from slipstream.families.common import QKV, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, QKNorm, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    norm = Norm("layer", config.layer_norm_eps)
    qk_norm = QKNorm(norm) if config.qk_layernorm else None
    return llama_like(config, index, norm=norm, parallel=True, gated=False, qk_norm=qk_norm)


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=Norm("layer", config.layer_norm_eps), final_norm="model.final_layernorm")


FAMILY = Family(
    name="phi",
    layers=("PhiDecoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("input_layernorm"),
        Role.QKV: QKV,
        Role.Q_NORM: Take("self_attn.q_layernorm"),
        Role.K_NORM: Take("self_attn.k_layernorm"),
        Role.ATTN_OUT: Take("self_attn.dense"),
        Role.MLP_IN: Take("mlp.fc1"),
        Role.MLP_OUT: Take("mlp.fc2"),
    },
    frame=_frame,
    tiny=(
        tiny("PhiForCausalLM", "PhiConfig", num_hidden_layers=2),
        tiny(
            "PhiForCausalLM", "PhiConfig", label="query and key norms", num_hidden_layers=2, qk_layernorm=True
        ),
    ),
)
