"""Kimi Linear and Bailing hybrid: latent attention in some layers, delta attention (not fused) in others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import own_mixer, tiny
from slipstream.families.deepseek import (
    TINY_MIXTURE,
    TINY_RANKS,
    latent_like,
    latent_recipes,
    with_experts,
)
from slipstream.families.experts import CORRECTED
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Gate, Role, Rope
from slipstream.weights.recipe import Take

_LINEAR = "linear attention"


def _mixed(config: Config, index: int, spec: BlockSpec) -> BlockSpec:
    if config.layer_types[index] != "full_attention":
        spec = replace(spec, mixer=_LINEAR, rope=None, gate=None)
    # A config may also have `n_routed_experts`, which these layers do not read.
    return with_experts(config, index, spec, experts=int(config.num_experts))


def _kimi(config: Config, index: int) -> BlockSpec:
    return _mixed(config, index, latent_like(config, index, rope=None))


def _bailing(config: Config, index: int) -> BlockSpec:
    rope = Rope(config.qk_rope_head_dim)
    spec = latent_like(config, index, rope=rope, interleaved=True, gate=Gate(per="head"))
    latent = None if spec.latent is None else replace(spec.latent, query_rank=None)
    return _mixed(config, index, replace(spec, latent=latent))


_RECIPES = {**latent_recipes(CORRECTED), Role.ATTN_GATE: Take("self_attn.g_proj")}
_TINY: dict[str, Any] = {
    **TINY_RANKS,
    **TINY_MIXTURE,
    "num_experts": 8,
    "n_routed_experts": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "head_dim": 16,
}

FAMILIES = tuple(
    Family(
        name=name,
        layers=(f"{prefix}DecoderLayer",),
        spec=spec,
        recipes=_RECIPES,
        mixers={_LINEAR: own_mixer("self_attn")},
        tiny=(tiny(f"{prefix}ForCausalLM", f"{prefix}Config", **{**_TINY, **options}),),
    )
    for name, prefix, spec, options in (
        ("kimi_linear", "KimiLinear", _kimi, {"q_lora_rank": None}),
        ("bailing_hybrid", "BailingHybrid", _bailing, {}),
    )
)
