"""CTRL: scaled embeddings, a sinusoidal position table in a buffer, ReLU."""

from __future__ import annotations

import math

from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = config.n_embd // config.n_head
    return BlockSpec(
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=dim,
        ffn=config.dff,
        norm=Norm("layer", 1e-6),
        activation="relu",
        gated=False,
        scale=dim**-0.5,
    )


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="transformer.h",
        embed="transformer.w",
        embed_scale=math.sqrt(config.n_embd),
        pos_embed="transformer.pos_encoding",
        head="lm_head",
        norm=Norm("layer", config.layer_norm_epsilon),
        final_norm="transformer.layernorm",
    )


def _refuse(config: Config) -> str | None:
    whole = config.n_embd % config.n_head == 0
    return None if whole else f"n_embd {config.n_embd} is not a multiple of n_head {config.n_head}"


_TINY = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 96, "n_positions": 256}

FAMILY = Family(
    name="ctrl",
    layers=("modeling_ctrl.EncoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("layernorm1"),
        Role.QKV: Stack(tuple(f"multi_head_attention.W{part}" for part in "qkv")),
        Role.ATTN_OUT: Take("multi_head_attention.dense"),
        Role.MLP_NORM: Take("layernorm2"),
        Role.MLP_IN: Take("ffn.0"),
        Role.MLP_OUT: Take("ffn.2"),
    },
    frame=_frame,
    refuse=_refuse,
    tiny=(Tiny("CTRLLMHeadModel", "CTRLConfig", _TINY),),
)
