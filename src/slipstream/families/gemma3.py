"""Gemma 3 (text) and EmbeddingGemma: sandwich norms, q and k normalised, windowed layers with own angles."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import (
    QK_NORMS,
    SANDWICH_RECIPES,
    layer_type,
    llama_frame,
    llama_like,
    rope,
    tiny,
    window,
)
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, QKNorm


def _norm(config: Config) -> Norm:
    return Norm("rms", config.rms_norm_eps, offset=1.0)


def _spec(config: Config, index: int) -> BlockSpec:
    # The attention has a field for a softcap of scores, but does not use it.
    size, bidirectional = window(config, index), bool(config.use_bidirectional_attention)
    return llama_like(
        config,
        index,
        norm=_norm(config),
        activation=config.hidden_activation,
        qk_norm=QKNorm(_norm(config)),
        rope=rope(config, layer_type=layer_type(config, index)),
        scale=config.query_pre_attn_scalar**-0.5,
        causal=not bidirectional,
        window=2 * (size - 1) if size and bidirectional else size,
    )


def _frame(config: Config) -> FrameSpec | None:
    if config.use_bidirectional_attention:
        return None
    return llama_frame(
        config,
        norm=_norm(config),
        embed_scale=config.hidden_size**0.5,
        embed_scale_rounded=True,
        logit_softcap=config.final_logit_softcapping,
    )


_TINY: dict[str, Any] = {
    "head_dim": 24,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20,
}
_LINEAR: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
}

FAMILY = Family(
    name="gemma3_text",
    layers=("Gemma3DecoderLayer",),
    spec=_spec,
    recipes={**SANDWICH_RECIPES, **QK_NORMS},
    frame=_frame,
    tiny=(
        tiny("Gemma3ForCausalLM", "Gemma3TextConfig", **_TINY),
        tiny(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            label="scaled global angles, caps, eager",
            rope_parameters=_LINEAR,
            attn_implementation="eager",
            attn_logit_softcapping=0.5,
            final_logit_softcapping=2.0,
            **_TINY,
        ),
        tiny(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            label="bidirectional",
            use_bidirectional_attention=True,
            **_TINY,
        ),
    ),
)
