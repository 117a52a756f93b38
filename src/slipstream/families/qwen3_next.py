"""Qwen3-Next and Qwen3.5: gated attention in some layers, gated delta nets in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import (
    MOE_RECIPES,
    QK_NORMS,
    llama_frame,
    llama_like,
    own_mixer,
    sparse_layer,
    tiny,
)
from slipstream.families.experts import GATED_SHARED
from slipstream.families.family import Config, Family, RecurrentParts
from slipstream.families.recurrences import DELTA_BY_HEAD, DELTA_BY_KIND, delta_rule
from slipstream.spec import BlockSpec, FrameSpec, Gate, MoE, Norm, QKNorm, Role
from slipstream.weights.gated import GatedQueries

_LINEAR = "linear attention"


def _dense(config: Config, index: int, *, by_head: bool = False) -> BlockSpec:
    norm = Norm("rms", config.rms_norm_eps, offset=1.0)
    spec = llama_like(config, index, norm=norm, qk_norm=QKNorm(norm), gate=Gate())
    if config.layer_types[index] == "full_attention":
        return spec
    recurrence = delta_rule(config, by_head=by_head)
    return replace(spec, mixer=_LINEAR, recurrence=recurrence, rope=None, gate=None, qk_norm=None)


def _experts(config: Config, index: int, *, normalize: bool = True, by_head: bool = False) -> BlockSpec:
    moe = MoE(
        config.num_experts,
        config.num_experts_per_tok,
        normalize=normalize,
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return replace(_dense(config, index, by_head=by_head), ffn=config.moe_intermediate_size, moe=moe)


def _next(config: Config, index: int) -> BlockSpec:
    if not sparse_layer(config, index):
        return _dense(config, index, by_head=True)
    return _experts(config, index, normalize=bool(config.norm_topk_prob), by_head=True)


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=Norm("rms", config.rms_norm_eps, offset=1.0))


_TINY: dict[str, Any] = {
    "head_dim": 24,
    # Keys are divided by their norm: with fewer dims it may be small, which amplifies rounding errors.
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_ATTENDING = ["full_attention"] * 3
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}


def _family(
    name: str, prefix: str, spec: Any, config: str, parts: RecurrentParts, **variants: dict[str, Any]
) -> Family:
    return Family(
        name=name,
        layers=(f"{prefix}DecoderLayer",),
        spec=spec,
        recipes={
            **MOE_RECIPES,
            **GATED_SHARED,
            **QK_NORMS,
            Role.QKV: GatedQueries(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        },
        mixers={_LINEAR: own_mixer("linear_attn", recurrent=parts)},
        frame=_frame,
        tiny=tuple(
            tiny(f"{prefix}ForCausalLM", config, label=label.replace("_", " "), **{**_TINY, **options})
            for label, options in variants.items()
        ),
    )


FAMILIES = (
    _family(
        "qwen3_next",
        "Qwen3Next",
        _next,
        "Qwen3NextConfig",
        DELTA_BY_HEAD,
        mixed={"layer_types": _MIXED, "mlp_only_layers": [2], **_EXPERTS},
        attending={"layer_types": _ATTENDING, "attention_bias": True, "norm_topk_prob": False, **_EXPERTS},
    ),
    _family(
        "qwen3_5_text",
        "Qwen3_5",
        _dense,
        "Qwen3_5TextConfig",
        DELTA_BY_KIND,
        mixed={"layer_types": _MIXED},
        attending={"layer_types": _ATTENDING},
    ),
    _family(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        _experts,
        "Qwen3_5MoeTextConfig",
        DELTA_BY_KIND,
        mixed={"layer_types": _MIXED, **_EXPERTS},
    ),
)
