"""Moshi's language model: llama's layer with a rotary module of its own in each attention."""

from __future__ import annotations

from slipstream.families.common import llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, ffn=config.ffn_dim // 2)


def _refuse(config: Config) -> str | None:
    flexible = config.model_type == "moshi_depth"
    return "each position in the sequence has a matrix of its own" if flexible else None


FAMILY = Family(
    name="moshi",
    layers=("MoshiDecoderLayer",),
    spec=_spec,
    refuse=_refuse,
    recipes={
        Role.ATTN_NORM: Take("input_layernorm"),
        Role.QKV: Stack(tuple(f"self_attn.{part}_proj.linear" for part in "qkv")),
        Role.ATTN_OUT: Take("self_attn.o_proj.linear"),
        Role.MLP_NORM: Take("post_attention_layernorm"),
        Role.MLP_IN: Take("mlp.fc1"),
        Role.MLP_OUT: Take("mlp.fc2"),
    },
    rotary="self_attn.rotary_emb",
    tiny=(tiny("MoshiForCausalLM", "MoshiConfig", ffn_dim=192, head_dim=24, sliding_window=5),),
)
