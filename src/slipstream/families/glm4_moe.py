"""GLM-4.5, dots.llm1, Solar Open and EXAONE-MoE: DeepSeek-V3's experts behind llama's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import llama_frame, llama_like, llama_windowed, rope, tiny, window
from slipstream.families.experts import CORRECTED, TINY_EXPERTS, corrected_moe, is_sparse
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm


def _with_experts(config: Config, index: int, dense: BlockSpec) -> BlockSpec:
    if not is_sparse(config, index):
        return dense
    return replace(dense, ffn=config.moe_intermediate_size, moe=corrected_moe(config))


def _qk_norm(config: Config) -> QKNorm:
    return QKNorm(Norm("rms", config.rms_norm_eps))


def _glm(config: Config, index: int) -> BlockSpec:
    norm = _qk_norm(config) if config.use_qk_norm else None
    return _with_experts(config, index, llama_like(config, index, qk_norm=norm))


def _dots(config: Config, index: int) -> BlockSpec:
    return _with_experts(config, index, llama_windowed(config, index, qk_norm=_qk_norm(config)))


def _solar(config: Config, index: int) -> BlockSpec:
    moe = corrected_moe(config)
    return llama_like(config, index, ffn=config.moe_intermediate_size, moe=moe)


def _exaone(config: Config, index: int) -> BlockSpec:
    rotates = config.sliding_window is None or window(config, index) is not None
    angles = rope(config) if rotates else None
    dense = llama_windowed(config, index, qk_norm=_qk_norm(config), rope=angles)
    return _with_experts(config, index, dense)


_GROUPS: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_TINY: dict[str, Any] = {**TINY_EXPERTS, "head_dim": 16}
_EXAONE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
}


def _family(name: str, prefix: str, spec: Any, **variants: dict[str, Any]) -> Family:
    return Family(
        name=name,
        layers=(f"{prefix}DecoderLayer",),
        spec=spec,
        recipes=CORRECTED,
        frame=llama_frame,
        tiny=tuple(
            tiny(f"{prefix}ForCausalLM", f"{prefix}Config", label=label.replace("_", " "), **options)
            for label, options in variants.items()
        ),
    )


FAMILIES = (
    _family(
        "glm4_moe",
        "Glm4Moe",
        _glm,
        groups={**_TINY, **_GROUPS, "first_k_dense_replace": 1},
        normalised_heads={**_TINY, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False},
    ),
    _family(
        "dots1",
        "Dots1",
        _dots,
        groups={**_TINY, **_GROUPS, "first_k_dense_replace": 1},
        windows={
            **_TINY,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    _family("solar_open", "SolarOpen", _solar, groups={**_TINY, **_GROUPS}),
    _family(
        "exaone_moe",
        "ExaoneMoe",
        _exaone,
        windows={**_EXAONE, **_GROUPS},
    ),
)
