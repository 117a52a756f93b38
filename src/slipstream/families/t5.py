"""T5 and similar models: unscaled scores, a learned bias by relative position, RMS norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from slipstream.families.common import field
from slipstream.families.family import Config, Family, OwnAttention, Tiny
from slipstream.families.local import block_wise
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import First, Recipe, Stack, Take

__all__ = ["T5_RECIPES", "T5_TINY", "t5_frame", "t5_layer"]


def t5_layer(config: Config, relative: Literal["shared", "own"], *, gated: bool) -> BlockSpec:
    """Return the spec of an encoder or decoder layer; the config's `is_decoder` tells which."""
    return BlockSpec(
        hidden=config.d_model,
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_dim=config.d_kv,
        ffn=config.d_ff,
        norm=Norm("rms", config.layer_norm_epsilon),
        activation=config.dense_act_fn,
        gated=gated,
        causal=config.is_decoder,
        cross=config.d_model if config.is_decoder else None,
        relative=relative,
        clamp="branch",
    )


def _shared(config: Config, index: int) -> BlockSpec:
    return t5_layer(config, "shared", gated=bool(config.is_gated_act))


def _own(config: Config, index: int) -> BlockSpec:
    return t5_layer(config, "own", gated=bool(config.is_gated_act))


def _long(config: Config, index: int) -> BlockSpec:
    # LongT5's encoder attends within blocks; its decoder is T5's.
    return replace(
        t5_layer(config, "shared", gated=bool(config.is_gated_act)), own_attention=not config.is_decoder
    )


def _frame(config: Config) -> FrameSpec:
    # UMT5 always scales the head's input; the others have a field for it: not every tied head was trained so.
    scaled = field(config, "scale_decoder_outputs", default=config.model_type == "umt5")
    return t5_frame(config, scaled=scaled)


def t5_frame(config: Config, *, scaled: bool) -> FrameSpec:
    """Return the frame around the decoder's layers; `scaled` if the head's input is scaled down."""
    return FrameSpec(
        layers="decoder.block",
        embed="decoder.embed_tokens",
        head="lm_head",
        norm=Norm("rms", config.layer_norm_epsilon),
        final_norm="decoder.final_layer_norm",
        logit_scale=config.d_model**-0.5 if scaled else 1.0,
    )


def _last(part: str) -> tuple[str, str]:
    """Return a feed-forward part's paths, in decoder layers (after cross-attention) and in encoder layers."""
    return f"layer.2.{part}", f"layer.1.{part}"


_GATED = tuple(
    Stack((f"{path}_0", f"{path}_1")) if gated else Take(path)
    for path in _last("DenseReluDense.wi")
    for gated in (True, False)
)
T5_RECIPES: Mapping[Role, Recipe] = {
    Role.ATTN_NORM: Take("layer.0.layer_norm"),
    Role.QKV: Stack(tuple(f"layer.0.SelfAttention.{part}" for part in "qkv")),
    Role.ATTN_OUT: Take("layer.0.SelfAttention.o"),
    Role.CROSS_NORM: Take("layer.1.layer_norm"),
    Role.CROSS_Q: Take("layer.1.EncDecAttention.q"),
    Role.CROSS_KV: Stack(tuple(f"layer.1.EncDecAttention.{part}" for part in "kv")),
    Role.CROSS_OUT: Take("layer.1.EncDecAttention.o"),
    Role.MLP_NORM: First(tuple(Take(path) for path in _last("layer_norm"))),
    Role.MLP_IN: First(_GATED),
    Role.MLP_OUT: First(tuple(Take(path) for path in _last("DenseReluDense.wo"))),
}
T5_TINY: Mapping[str, Any] = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 8,
    "num_heads": 4,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def _family(name: str, prefix: str, *variants: Tiny, relative: Literal["shared", "own"] = "shared") -> Family:
    return Family(
        name=name,
        layers=(f"{prefix}Block",),
        spec=_shared if relative == "shared" else _own,
        recipes=T5_RECIPES,
        frame=_frame,
        ignored=("*.relative_attention_bias.weight",),
        relative="layer.0.SelfAttention",
        tiny=variants,
    )


def _tiny(prefix: str, label: str = "", **options: Any) -> Tiny:
    return Tiny(f"{prefix}ForConditionalGeneration", f"{prefix}Config", {**T5_TINY, **options}, label)


_LONG = (
    _tiny("LongT5", "local", local_radius=3, tie_word_embeddings=False),
    _tiny(
        "LongT5",
        "transient-global",
        local_radius=2,
        encoder_attention_type="transient-global",
        global_block_size=4,
        feed_forward_proj="gated-gelu",
    ),
)
_ATTENTIONS = tuple(f"layer.0.{kind}SelfAttention" for kind in ("", "Local", "TransientGlobal"))
_LONG_RECIPES: Mapping[Role, Recipe] = {
    **T5_RECIPES,
    Role.QKV: First(tuple(Stack(tuple(f"{path}.{part}" for part in "qkv")) for path in _ATTENTIONS)),
    Role.ATTN_OUT: First(tuple(Take(f"{path}.o") for path in _ATTENTIONS)),
}

FAMILIES = (
    _family(
        "t5",
        "T5",
        _tiny("T5"),
        _tiny("T5", "gated", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    _family("mt5", "MT5", _tiny("MT5")),
    _family("umt5", "UMT5", _tiny("UMT5"), relative="own"),
    replace(
        _family("longt5", "LongT5", *_LONG),
        spec=_long,
        recipes=_LONG_RECIPES,
        ignored=(
            "*relative_attention_bias.weight",
            "layer.0.TransientGlobalSelfAttention.global_input_layer_norm.weight",
        ),
        attention=OwnAttention(
            block_wise,
            frozenset({"attention_mask", "position_bias"}),
        ),
    ),
)
