"""Gemma 3n: four streams of states, of which one runs through the block; sparse gates, a narrow branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.families.common import (
    QK_NORMS,
    SANDWICH_RECIPES,
    layer_type,
    llama_frame,
    llama_like,
    tiny,
    window,
)
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.families.gemma4 import QKV_SHARED, layer_inputs, sharing
from slipstream.spec import (
    BlockSpec,
    FrameSpec,
    FrameStreams,
    Norm,
    QKNorm,
    Role,
    Rope,
    Streams,
)
from slipstream.weights.recipe import Take

_STREAMS = "alternating updates of four streams"


def _spec(config: Config, index: int) -> BlockSpec:
    norm, shares = Norm("rms", config.rms_norm_eps), sharing(config, index)
    return llama_like(
        config,
        index,
        ffn=config.intermediate_size[index],
        activation=config.hidden_activation,
        qk_norm=QKNorm(norm),
        value_norm=shares != "borrows",
        sharing=shares,
        rope=Rope(config.head_dim, layer_type=layer_type(config, index)),
        window=window(config, index),
        scale=1.0,
        inputs=config.hidden_size_per_layer_input,
        sparsity=config.activation_sparsity_pattern[index],
        streams=Streams(
            count=config.altup_num_inputs,
            active=config.altup_active_idx,
            rank=config.laurel_rank,
            scaled=config.altup_correct_scale,
        ),
        course=_STREAMS,
    )


def _frame(config: Config) -> FrameSpec:
    others = range(config.altup_num_inputs - 1)
    return llama_frame(
        config,
        embed_scale=config.hidden_size**0.5,
        embed_scale_rounded=True,
        logit_softcap=config.final_logit_softcapping,
        inputs=layer_inputs(config, rows=config.vocab_size_per_layer_input),
        streams=FrameStreams(
            enter=tuple(f"model.altup_projections.{i}" for i in others),
            leave=tuple(f"model.altup_unembed_projections.{i}" for i in others),
        ),
        embedders=("model.embed_vision", "model.embed_audio"),
    )


def _streams(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    return heads.streams(x, given["per_layer_input"], shared_as=_name(layer.self_attn))


def _name(attention: Any) -> int | None:
    """Return the name of shared keys and values: in older transformers the layer they are from; else None."""
    if not hasattr(attention, "kv_shared_layer_index"):
        return None
    return int(
        attention.layer_idx if attention.kv_shared_layer_index is None else attention.kv_shared_layer_index
    )


_TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "laurel_rank": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
_BUILT = "Gemma3nForCausalLM", "Gemma3nTextConfig"

FAMILY = Family(
    name="gemma3n_text",
    layers=("Gemma3nTextDecoderLayer",),
    spec=_spec,
    frame=_frame,
    recipes={
        **SANDWICH_RECIPES,
        **QK_NORMS,
        Role.QKV: QKV_SHARED,
        Role.INPUT_GATE: Take("per_layer_input_gate"),
        Role.INPUT_OUT: Take("per_layer_projection"),
        Role.INPUT_NORM: Take("post_per_layer_input_norm"),
        Role.STREAM_NORM: Take("altup.router_norm"),
        Role.STREAM_ROUTER: Take("altup.modality_router"),
        Role.STREAM_PREDICT: Take("altup.prediction_coefs"),
        Role.STREAM_CORRECT: Take("altup.correction_coefs"),
        Role.STREAM_SCALE: Take("altup.correct_output_scale"),
        Role.NARROW_IN: Take("laurel.linear_left"),
        Role.NARROW_OUT: Take("laurel.linear_right"),
        Role.NARROW_NORM: Take("laurel.post_laurel_norm"),
    },
    courses={_STREAMS: OwnCourse(_streams, reads=frozenset({"per_layer_input"}))},
    tiny=(
        tiny(*_BUILT, num_kv_shared_layers=2, activation_sparsity_pattern=[0.6, 0.0, 0.6, 0.0], **_TINY),
        tiny(*_BUILT, label="none shared", num_kv_shared_layers=0, altup_correct_scale=False, **_TINY),
        tiny(
            *_BUILT,
            label="three streams",
            num_kv_shared_layers=2,
            altup_num_inputs=3,
            altup_active_idx=1,
            activation_sparsity_pattern=[0.5, 0.9, 0.0, 0.0],
            **_TINY,
        ),
    ),
)
