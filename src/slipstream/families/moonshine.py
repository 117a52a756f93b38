"""Moonshine: a plain encoder and a gated decoder with partly rotary heads; its input is audio samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import QKV, head_dim, rope
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.feed_forward import UpFirst
from slipstream.weights.recipe import First, Stack, Take


def _encoder(config: Config, index: int) -> BlockSpec:
    heads = config.encoder_num_attention_heads
    dim = head_dim(config)
    rotated = rope(config, interleaved=True)
    return BlockSpec(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        ffn=config.intermediate_size,
        norm=Norm("layer", 1e-5),
        activation=config.encoder_hidden_act,
        gated=False,
        scale=dim**-0.5,
        causal=False,
        rope=replace(rotated, dim=rotated.dim + rotated.dim % 2),  # as many pairs as there are angles
    )


def _decoder(config: Config, index: int) -> BlockSpec:
    changes = {"activation": config.hidden_act, "gated": True, "causal": True, "cross": config.hidden_size}
    return replace(_encoder(config, index), **changes)


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="model.decoder.layers",
        embed="model.decoder.embed_tokens",
        head="proj_out",
        norm=Norm("layer", 1e-5),
        final_norm="model.decoder.norm",
        rotary="model.decoder.rotary_emb",
    )


def _refuse(config: Config) -> str | None:
    counts = {config.encoder_num_attention_heads, config.encoder_num_key_value_heads}
    counts |= {config.num_attention_heads, config.num_key_value_heads}
    return None if len(counts) == 1 else f"its numbers of heads differ ({sorted(counts)})"


_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

FAMILY = Family(
    name="moonshine",
    layers=("MoonshineEncoderLayer", "MoonshineDecoderLayer"),
    spec=_encoder,
    specs={"MoonshineDecoderLayer": _decoder},
    recipes={
        Role.ATTN_NORM: Take("input_layernorm"),
        Role.QKV: QKV,
        Role.ATTN_OUT: Take("self_attn.o_proj"),
        Role.CROSS_NORM: Take("post_attention_layernorm"),
        Role.CROSS_Q: Take("encoder_attn.q_proj"),
        Role.CROSS_KV: Stack(("encoder_attn.k_proj", "encoder_attn.v_proj")),
        Role.CROSS_OUT: Take("encoder_attn.o_proj"),
        Role.MLP_NORM: First((Take("final_layernorm"), Take("post_attention_layernorm"))),
        Role.MLP_IN: UpFirst("mlp.fc1"),
        Role.MLP_OUT: Take("mlp.fc2"),
    },
    frame=_frame,
    refuse=_refuse,
    tiny=(
        Tiny("MoonshineForConditionalGeneration", "MoonshineConfig", _TINY),
        Tiny(
            "MoonshineForConditionalGeneration",
            "MoonshineConfig",
            {**_TINY, "attention_bias": True, "pad_head_dim_to_multiple_of": 8},
            "biases, padded heads",
        ),
    ),
)
