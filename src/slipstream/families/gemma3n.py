"""Gemma 3n: four streams of states, of which one runs through the block; a second, narrow residual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.families.common import QK_NORMS, SANDWICH_RECIPES, layer_type, llama_like, tiny, window
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.families.gemma4 import QKV_SHARED, sharing
from slipstream.spec import BlockSpec, Norm, QKNorm, Role, Rope
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
        course=_STREAMS,
    )


def _streams(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    predicted, active = layer.altup.predict(x), layer.config.altup_active_idx
    stream = predicted[active]
    normed = heads.norm(Role.ATTN_NORM, stream)
    narrow = layer.laurel(normed)
    attended = heads.norm(Role.ATTN_POST_NORM, heads.attend(normed, shared_as=_name(layer.self_attn)))
    stream = (stream + attended + narrow) / math.sqrt(2)
    fed = _feed(heads, layer.mlp, heads.norm(Role.MLP_NORM, stream))
    corrected: Tensor = layer.altup.correct(predicted, stream + heads.norm(Role.MLP_POST_NORM, fed))
    first = corrected[active].clone()
    if layer.config.altup_correct_scale:
        first = layer.altup.scale_corrected_output(first)
    gate = layer.act_fn(heads.linear(Role.INPUT_GATE, first)) * given["per_layer_input"]
    corrected[1:] += heads.norm(Role.INPUT_NORM, heads.linear(Role.INPUT_OUT, gate))
    return corrected


def _name(attention: Any) -> int | None:
    """Return the name of shared keys and values: in older transformers the layer they are from; else None."""
    if not hasattr(attention, "kv_shared_layer_index"):
        return None
    return int(
        attention.layer_idx if attention.kv_shared_layer_index is None else attention.kv_shared_layer_index
    )


def _feed(heads: Branches, mlp: Any, x: Tensor) -> Tensor:
    """Run the feed-forward; in a sparse layer only the largest gate values are kept."""
    if not mlp.activation_sparsity:
        return heads.feed(x)
    gate, up = heads.linear(Role.MLP_IN, x).chunk(2, dim=-1)
    return heads.linear(Role.MLP_OUT, mlp.act_fn(mlp._gaussian_topk(gate)) * up)


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
    recipes={
        **SANDWICH_RECIPES,
        **QK_NORMS,
        Role.QKV: QKV_SHARED,
        Role.INPUT_GATE: Take("per_layer_input_gate"),
        Role.INPUT_OUT: Take("per_layer_projection"),
        Role.INPUT_NORM: Take("post_per_layer_input_norm"),
    },
    courses={
        _STREAMS: OwnCourse(
            _streams, ("altup", "laurel"), frozenset({"per_layer_input"}), "the mixing of streams"
        )
    },
    tiny=(
        tiny(*_BUILT, num_kv_shared_layers=2, activation_sparsity_pattern=[0.6, 0.0, 0.6, 0.0], **_TINY),
        tiny(*_BUILT, label="none shared", num_kv_shared_layers=0, altup_correct_scale=False, **_TINY),
    ),
)
