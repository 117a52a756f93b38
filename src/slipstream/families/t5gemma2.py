"""T5Gemma 2: Gemma 3's layers; the decoder attends to its own and the encoder's keys in one softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.families.common import QK_NORMS, layer_type, llama_like, rope
from slipstream.families.family import Branches, Config, Family, OwnCourse, Tiny
from slipstream.families.t5gemma import T5GEMMA_RECIPES, T5GEMMA_TINY, t5gemma_norm
from slipstream.spec import BlockSpec, QKNorm, Role

_MERGED = "both kinds of attention at once"


def _encoder(config: Config, index: int) -> BlockSpec:
    # Windows are only in the masks. The attention has fields for a softcap, but does not use them.
    return _layer(config, index, causal=False)


def _decoder(config: Config, index: int) -> BlockSpec:
    return _layer(config, index, course=_MERGED)


def _layer(config: Config, index: int, **changes: Any) -> BlockSpec:
    norm = t5gemma_norm(config)
    return llama_like(
        config,
        index,
        norm=norm,
        activation=config.hidden_activation,
        qk_norm=QKNorm(norm),
        rope=rope(config, layer_type=layer_type(config, index)),
        scale=config.query_pre_attn_scalar**-0.5,
        **changes,
    )


def _run(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    mask: Any = given["merged_attention_mask"]
    attended = heads.attend(
        heads.norm(Role.ATTN_NORM, x), mask=mask, beyond=_read_encoder(heads, layer, given)
    )
    x = x + heads.norm(Role.ATTN_POST_NORM, attended)
    return x + heads.norm(Role.MLP_POST_NORM, heads.feed(heads.norm(Role.MLP_NORM, x)))


def _read_encoder(heads: Branches, layer: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return keys and values of the encoder's states, from the cache if it has them."""
    spec, index = heads.spec, layer.layer_idx
    states, caches = given["encoder_hidden_states"], given.get("past_key_values")
    if caches is not None and caches.is_updated.get(index):
        kept = caches.cross_attention_cache.layers[index]
        return kept.keys, kept.values
    rows = heads.linear(Role.QKV, states)[..., spec.q_dim :].unflatten(-1, (-1, spec.head_dim))
    k, v = (part.transpose(1, 2) for part in rows.split(spec.kv_heads, dim=2))
    k = heads.norm(Role.K_NORM, k)
    if caches is not None:
        k, v = caches.cross_attention_cache.update(k, v, index)
        caches.is_updated[index] = True
    return k, v


_READS = frozenset({"merged_attention_mask", "encoder_hidden_states"})
_PATTERN: dict[str, Any] = {**T5GEMMA_TINY, "sliding_window_pattern": 2}
_PICTURE: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
}


def _tiny(label: str = "", **options: Any) -> Tiny:
    parts = {
        "encoder": {"text_config": _PATTERN, "vision_config": _PICTURE, "mm_tokens_per_image": 16},
        "decoder": _PATTERN,
    }
    own = {"decoder_start_token_id": 1, **parts, **options}
    return Tiny("T5Gemma2ForConditionalGeneration", "T5Gemma2Config", own, label)


FAMILY = Family(
    name="t5gemma2",
    layers=("T5Gemma2EncoderLayer", "T5Gemma2DecoderLayer"),
    spec=_encoder,
    specs={"T5Gemma2DecoderLayer": _decoder},
    recipes={**T5GEMMA_RECIPES, **QK_NORMS},
    courses={_MERGED: OwnCourse(_run, reads=_READS, needs=_READS)},
    tiny=(_tiny(), _tiny("eager", attn_implementation="eager")),
)
