"""Models whose attention no block supports: it runs its own code, and the rest of the layer is fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.families.common import LLAMA_RECIPES, llama_like, tiny
from slipstream.families.deepseek import TINY_MIXTURE, TINY_RANKS, with_experts
from slipstream.families.experts import CORRECTED
from slipstream.families.family import Config, Family, OwnMixer, Tiny
from slipstream.spec import BlockSpec

_INDEXED = "latent attention over selected tokens"
_DIFFERENTIAL = "differential attention"
_PASSED = ("position_embeddings", "attention_mask", "position_ids", "past_key_values")


def _attend(mixer: Any, x: Any, given: Mapping[str, Any]) -> Any:
    return mixer(hidden_states=x, **{name: given.get(name) for name in _PASSED})[0]


def _indexed(config: Config, index: int) -> BlockSpec:
    return with_experts(config, index, llama_like(config, index, rope=None, mixer=_INDEXED))


def _noted(config: Config, index: int) -> BlockSpec:
    spec = _indexed(config, index)
    if spec.moe is None:
        return spec
    return replace(
        spec, moe=replace(spec.moe, shared=config.shared_experts_intermediate_size * config.n_shared_experts)
    )


def _differential(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, rope=None, mixer=_DIFFERENTIAL)


_INDEX: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 6}


def _family(name: str, layer: str, spec: Any, mixer: str, *built: Tiny) -> Family:
    return Family(
        name=name,
        layers=(layer,),
        spec=spec,
        recipes=LLAMA_RECIPES if mixer == _DIFFERENTIAL else CORRECTED,
        mixers={mixer: OwnMixer("self_attn", _attend)},
        tiny=built,
    )


_CHOOSING: dict[str, Any] = {**TINY_RANKS, **TINY_MIXTURE, **_INDEX}
_NOTED: dict[str, Any] = {
    **_CHOOSING,
    "per_layer_config": {},
    "head_dim": 24,
    "sliding_window": 5,
    "shared_experts_intermediate_size": 40,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}

FAMILIES = (
    _family(
        "dots3_note_text",
        "Dots3NoteTextDecoderLayer",
        _noted,
        _INDEXED,
        tiny("Dots3NoteForCausalLM", "Dots3NoteTextConfig", **_NOTED),
    ),
    _family(
        "diffllama",
        "DiffLlamaDecoderLayer",
        _differential,
        _DIFFERENTIAL,
        tiny("DiffLlamaForCausalLM", "DiffLlamaConfig"),
    ),
)
