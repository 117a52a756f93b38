"""BART and the translation and dialogue models with its layers; some normalise before each branch instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from slipstream.families.common import QKV
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Recipe, Stack, Take

__all__ = ["BART_RECIPES", "BART_TINY", "bart_decoder", "bart_encoder", "bart_frame"]

BART_RECIPES: Mapping[Role, Recipe] = {
    Role.ATTN_NORM: Take("self_attn_layer_norm"),
    Role.QKV: QKV,
    Role.ATTN_OUT: Take("self_attn.out_proj"),
    Role.CROSS_NORM: Take("encoder_attn_layer_norm"),
    Role.CROSS_Q: Take("encoder_attn.q_proj"),
    Role.CROSS_KV: Stack(("encoder_attn.k_proj", "encoder_attn.v_proj")),
    Role.CROSS_OUT: Take("encoder_attn.out_proj"),
    Role.MLP_NORM: Take("final_layer_norm"),
    Role.MLP_IN: Take("fc1"),
    Role.MLP_OUT: Take("fc2"),
}

BART_TINY: Mapping[str, Any] = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}

Place = Literal["pre", "post"]


def bart_encoder(config: Config, place: Place) -> BlockSpec:
    """Return the spec of an encoder layer."""
    return _layer(config, config.encoder_attention_heads, config.encoder_ffn_dim, place)


def bart_decoder(config: Config, place: Place) -> BlockSpec:
    """Return the spec of a decoder layer."""
    spec = _layer(config, config.decoder_attention_heads, config.decoder_ffn_dim, place)
    return replace(spec, causal=True, cross=config.d_model, clamp=None)


def _trocr(config: Config, index: int) -> BlockSpec:
    width = config.cross_attention_hidden_size or config.d_model
    return replace(bart_decoder(config, "post"), cross=width if config.is_decoder else None)


def _layer(config: Config, heads: int, ffn: int, place: Place) -> BlockSpec:
    dim = config.d_model // heads
    return BlockSpec(
        hidden=config.d_model,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        ffn=ffn,
        norm=Norm("layer", 1e-5),
        place=place,
        activation=config.activation_function,
        gated=False,
        scale=dim**-0.5,
        causal=False,
        clamp="end",
    )


def _by_place(make: Callable[[Config, Place], BlockSpec], place: Place) -> Callable[[Config, int], BlockSpec]:
    return lambda config, index: make(config, place)


def bart_frame(config: Config, place: Place, **changes: Any) -> FrameSpec:
    """Return the frame around the decoder's layers, whether its model has an encoder or is one's decoder."""
    frame = FrameSpec(
        layers="model.decoder.layers",
        embed="model.decoder.embed_tokens",
        embed_scale=math.sqrt(config.d_model) if config.scale_embedding else 1.0,
        pos_embed="model.decoder.embed_positions",
        head="lm_head",
        norm=Norm("layer", 1e-5),
        final_norm="model.decoder.layer_norm" if place == "pre" else None,
        logit_bias="final_logits_bias" if config.is_encoder_decoder else None,
    )
    if changes.pop("pos_padding", False):
        # Positions count from `pad_token_id + 1`, over tokens that are not padding.
        padding = int(config.pad_token_id)
        changes |= {"pos_padding": padding, "pos_offset": padding + 1}
    return replace(frame, **changes)


def _trocr_frame(config: Config) -> FrameSpec:
    embed_norm = "model.decoder.layernorm_embedding" if config.layernorm_embedding else None
    changes: dict[str, Any] = {"embed_norm": embed_norm, "head": "output_projection", "logit_bias": None}
    changes |= {"pos_offset": 2} if config.use_learned_position_embeddings else {"pos_padding": True}
    return bart_frame(config, "post", **changes)


_SMALL = {"embed_norm": "model.decoder.layernorm_embedding", "pos_after_norm": True}
_NORMED = {"embed_norm": "model.decoder.layernorm_embedding", "pos_offset": 2}


def _family(
    name: str, prefix: str, place: Place, *more: Tiny, around: Mapping[str, Any], **options: Any
) -> Family:
    def frame(config: Config) -> FrameSpec:
        return bart_frame(config, place, **around)

    return Family(
        name=name,
        layers=(f"{prefix}EncoderLayer", f"{prefix}DecoderLayer"),
        spec=_by_place(bart_encoder, place),
        specs={f"{prefix}DecoderLayer": _by_place(bart_decoder, place)},
        recipes=BART_RECIPES,
        frame=frame,
        tiny=(_tiny(prefix, **options), *more),
    )


def _tiny(prefix: str, label: str = "", model: str = "ForConditionalGeneration", **options: Any) -> Tiny:
    return Tiny(f"{prefix}{model}", f"{prefix}Config", {**BART_TINY, **options}, label)


_ALONE = _tiny("Bart", "a decoder alone", "ForCausalLM", is_decoder=True)

FAMILIES = (
    _family("bart", "Bart", "post", _ALONE, around=_NORMED),
    _family("mbart", "MBart", "pre", around=_NORMED, scale_embedding=True),
    _family("pegasus", "Pegasus", "pre", around={}),
    _family("marian", "Marian", "post", around={}, model="MTModel"),
    _family("m2m_100", "M2M100", "pre", around={"pos_padding": True, "logit_bias": None}),
    _family("blenderbot", "Blenderbot", "pre", around={}),
    _family("blenderbot-small", "BlenderbotSmall", "post", around=_SMALL),
    _family("plbart", "PLBart", "post", around=_NORMED),
    _family("mvp", "Mvp", "post", around=_NORMED),
    Family(
        name="trocr",
        layers=("TrOCRDecoderLayer",),
        spec=_trocr,
        recipes=BART_RECIPES,
        frame=_trocr_frame,
        tiny=(_tiny("TrOCR", model="ForCausalLM"),),
    ),
)
