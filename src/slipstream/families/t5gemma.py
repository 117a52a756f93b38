"""T5Gemma: Gemma 2's layers as an encoder and a decoder, with cross-attention between its two branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.families.common import LLAMA_RECIPES, TINY, llama_like, window
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take

__all__ = ["T5GEMMA_RECIPES", "T5GEMMA_TINY", "t5gemma_norm"]


def t5gemma_norm(config: Config) -> Norm:
    """Return the kind of all norms in the model."""
    return Norm("rms", config.rms_norm_eps, offset=1.0)


def _encoder(config: Config, index: int) -> BlockSpec:
    spec, size = _decoder(config, index), window(config, index)
    # The encoder's windows extend by `size` to each side.
    return replace(spec, causal=False, cross=None, window=None if size is None else 2 * size)


def _decoder(config: Config, index: int) -> BlockSpec:
    # Versions of transformers that run this model with "sdpa" omit the softcap of scores in that case.
    return llama_like(
        config,
        index,
        norm=t5gemma_norm(config),
        activation=config.hidden_activation,
        scale=config.query_pre_attn_scalar**-0.5,
        softcap=None if config._attn_implementation == "sdpa" else config.attn_logit_softcapping,
        window=window(config, index),
        cross=getattr(config, "cross_attention_hidden_size", None),
    )


def _frame(config: Config) -> FrameSpec | None:
    decoder = getattr(config, "decoder", None)
    if decoder is None:
        return None
    return FrameSpec(
        layers="model.decoder.layers",
        embed="model.decoder.embed_tokens",
        head="lm_head.out_proj",
        norm=t5gemma_norm(decoder),
        final_norm="model.decoder.norm",
        rotary="model.decoder.rotary_emb",
        embed_scale=decoder.hidden_size**0.5,
        embed_scale_rounded=True,
        logit_softcap=decoder.final_logit_softcapping,
    )


T5GEMMA_RECIPES = {
    **LLAMA_RECIPES,
    Role.ATTN_NORM: Take("pre_self_attn_layernorm"),
    Role.ATTN_POST_NORM: Take("post_self_attn_layernorm"),
    Role.MLP_NORM: Take("pre_feedforward_layernorm"),
    Role.MLP_POST_NORM: Take("post_feedforward_layernorm"),
}

T5GEMMA_TINY: Mapping[str, Any] = {
    **TINY,
    "head_dim": 24,
    "sliding_window": 4,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 2.0,
}
_NARROW: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 4}


def _tiny(label: str = "", encoder: Mapping[str, Any] | None = None, **options: Any) -> Tiny:
    parts = {"encoder": {**T5GEMMA_TINY, **(encoder or {})}, "decoder": T5GEMMA_TINY}
    own = {"vocab_size": 128, "decoder_start_token_id": 1, **parts, **options}
    return Tiny("T5GemmaForConditionalGeneration", "T5GemmaConfig", own, label)


FAMILY = Family(
    name="t5gemma",
    layers=("T5GemmaEncoderLayer", "T5GemmaDecoderLayer"),
    spec=_encoder,
    specs={"T5GemmaDecoderLayer": _decoder},
    recipes={
        **T5GEMMA_RECIPES,
        Role.CROSS_NORM: Take("pre_cross_attn_layernorm"),
        Role.CROSS_Q: Take("cross_attn.q_proj"),
        Role.CROSS_KV: Stack(("cross_attn.k_proj", "cross_attn.v_proj")),
        Role.CROSS_OUT: Take("cross_attn.o_proj"),
        Role.CROSS_POST_NORM: Take("post_cross_attn_layernorm"),
    },
    frame=_frame,
    tiny=(
        _tiny(),
        _tiny("a narrower encoder, eager", _NARROW, attn_implementation="eager", tie_word_embeddings=False),
    ),
)
