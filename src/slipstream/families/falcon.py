"""Falcon in three styles: 7B (one key head, parallel), RW (ALiBi, sequential), the newer grouped decoder."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import TINY, alibi_slopes, rope
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import First, Interleaved, Take


def _spec(config: Config, index: int) -> BlockSpec:
    newer, heads, scale = config.new_decoder_architecture, config.num_attention_heads, config.head_dim**-0.5
    # The mask already contains the slopes; attention implementations other than sdpa add them again.
    again = config.alibi and config._attn_implementation != "sdpa"
    return BlockSpec(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_kv_heads if newer else 1 if config.multi_query else heads,
        head_dim=config.head_dim,
        ffn=config.ffn_hidden_size,
        norm=Norm("layer", config.layer_norm_epsilon),
        parallel=newer or config.parallel_attn,
        activation=config.activation,
        gated=False,
        scale=scale,
        cache_repeated=newer,
        alibi=alibi_slopes(heads) if config.alibi else None,
        alibi_scale=2 * scale if again else scale,
        alibi_in_mask=scale,
        rope=None if config.alibi else rope(config),
    )


def _frame(config: Config) -> FrameSpec | None:
    if config.alibi:  # the model rounds slope * position to bfloat16 in every dtype; only its own bias does
        return None
    return FrameSpec(
        layers="transformer.h",
        embed="transformer.word_embeddings",
        head="lm_head",
        norm=Norm("layer", config.layer_norm_epsilon),
        final_norm="transformer.ln_f",
        rotary="transformer.rotary_emb",
    )


_KEYS = ("vocab_size", "num_attention_heads", "max_position_embeddings", "bos_token_id", "eos_token_id")
_TINY = {key: TINY[key] for key in _KEYS} | {"hidden_size": 64, "num_hidden_layers": 2}
_RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 80}
_NEWER = {"new_decoder_architecture": True, "num_kv_heads": 2}
_VARIANTS: dict[str, dict[str, Any]] = {
    "7b": {},
    "rw": _RW,
    "rw, eager": {**_RW, "attn_implementation": "eager"},
    "rotary, sequential": {**_RW, "alibi": False},
    "newer": _NEWER,
    "newer, one norm": {**_NEWER, "num_ln_in_parallel_attn": 1, "bias": True},
}

FAMILY = Family(
    name="falcon",
    layers=("FalconDecoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: First((Take("ln_attn"), Take("input_layernorm"))),
        Role.QKV: Interleaved("self_attention.query_key_value"),
        Role.ATTN_OUT: Take("self_attention.dense"),
        Role.MLP_NORM: First((Take("ln_mlp"), Take("post_attention_layernorm"))),
        Role.MLP_IN: Take("mlp.dense_h_to_4h"),
        Role.MLP_OUT: Take("mlp.dense_4h_to_h"),
    },
    frame=_frame,
    tiny=tuple(
        Tiny("FalconForCausalLM", "FalconConfig", {**_TINY, **o}, label) for label, o in _VARIANTS.items()
    ),
)
