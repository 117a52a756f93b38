"""Persimmon: query and key norms, squared ReLU, q, k and v of each head together."""

from __future__ import annotations

from slipstream.families.common import TINY, llama_frame, plain_like, rope
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, QKNorm, Role
from slipstream.weights.recipe import Interleaved, Take


def _spec(config: Config, index: int) -> BlockSpec:
    qk_norm = QKNorm(Norm("layer", config.layer_norm_eps)) if config.qk_layernorm else None
    return plain_like(config, index, qk_norm=qk_norm, rope=rope(config))


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=Norm("layer", config.layer_norm_eps), final_norm="model.final_layernorm")


_TINY = {key: value for key, value in TINY.items() if key != "num_key_value_heads"} | {"num_hidden_layers": 2}

FAMILY = Family(
    name="persimmon",
    layers=("PersimmonDecoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("input_layernorm"),
        Role.QKV: Interleaved("self_attn.query_key_value"),
        Role.Q_NORM: Take("self_attn.q_layernorm"),
        Role.K_NORM: Take("self_attn.k_layernorm"),
        Role.ATTN_OUT: Take("self_attn.dense"),
        Role.MLP_NORM: Take("post_attention_layernorm"),
        Role.MLP_IN: Take("mlp.dense_h_to_4h"),
        Role.MLP_OUT: Take("mlp.dense_4h_to_h"),
    },
    frame=_frame,
    tiny=(
        Tiny("PersimmonForCausalLM", "PersimmonConfig", _TINY),
        Tiny(
            "PersimmonForCausalLM",
            "PersimmonConfig",
            {**_TINY, "qk_layernorm": False},
            "no query and key norms",
        ),
    ),
)
