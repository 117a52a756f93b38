"""Llama 3.2 Vision: layers with cross-attention to an image between the others, a tower with gated layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.families.common import LLAMA_RECIPES, QKV, field, llama_frame, llama_like, tiny
from slipstream.families.family import Branches, Config, Family, OwnCourse, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, QKNorm, Role
from slipstream.weights.recipe import Stack, Take

_LOOKS, _GATED = "attention to a picture", "gated branches"


def _looking(config: Config, index: int) -> BlockSpec:
    return llama_like(
        config,
        index,
        rope=None,
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)),
        cross=config.hidden_size,
        branches="feed_forward",
        course=_LOOKS,
    )


def _frame(config: Config) -> FrameSpec | None:
    return None if field(config, "cross_attention_layers", default=(0,)) else llama_frame(config)


def _look(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    spec, own = heads.spec, layer.cross_attn.layer_idx
    states: Any = given.get("cross_attention_states")
    cache: Any = given.get("past_key_values")

    def by_head(role: Role, rows: Tensor, count: int) -> Tensor:
        return heads.norm(role, rows.unflatten(-1, (count, spec.head_dim))).transpose(1, 2)

    q = by_head(Role.Q_NORM, heads.linear(Role.CROSS_Q, heads.norm(Role.ATTN_NORM, x)), spec.heads)
    if states is None:
        k, v = cache.layers[own].keys, cache.layers[own].values
    else:
        keys, values = heads.linear(Role.CROSS_KV, states.view(len(x), -1, spec.hidden)).chunk(2, dim=-1)
        k = by_head(Role.K_NORM, keys, spec.kv_heads)
        v = values.unflatten(-1, (spec.kv_heads, spec.head_dim)).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, own)
    attended = heads.linear(Role.CROSS_OUT, heads.heed(q, k, v, given.get("cross_attention_mask")))
    x = x + layer.cross_attn_attn_gate.tanh() * attended
    fed, rows = heads.feed(heads.norm(Role.MLP_NORM, x)), given.get("full_text_row_masked_out_mask")
    fed = fed if rows is None else rows[:, 0] * fed
    out: Tensor = x + layer.cross_attn_mlp_gate.tanh() * fed
    return out


def _tower(layer: Any, config: Config) -> BlockSpec:
    dim = config.hidden_size // config.attention_heads
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.attention_heads,
        kv_heads=config.attention_heads,
        head_dim=dim,
        ffn=config.intermediate_size,
        norm=Norm("layer", config.norm_eps),
        activation=config.hidden_act,
        gated=False,
        causal=False,
        scale=dim**-0.5,
        course=_GATED if layer.is_gated else None,
    )


def _first(config: Config, index: int) -> BlockSpec:
    raise AssertionError("the tower's layers are measured")


def _gated(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    x = x + layer.gate_attn.tanh() * heads.attend(heads.norm(Role.ATTN_NORM, x))
    out: Tensor = x + layer.gate_ffn.tanh() * heads.feed(heads.norm(Role.MLP_NORM, x))
    return out


_READS = frozenset({"cross_attention_states", "cross_attention_mask", "full_text_row_masked_out_mask"})
# Without a mask, it depends on the implementation of attention whether it is causal.
_NEEDS = frozenset({"cross_attention_mask"})
_GATES = ("cross_attn_attn_gate", "cross_attn_mlp_gate")
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_global_layers": 2,
    "attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "max_num_tiles": 2,
    "intermediate_layers_indices": [0, 1],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    "vision_output_dim": 96,
}

FAMILIES = (
    Family(
        name="mllama",
        layers=("MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer"),
        spec=llama_like,
        specs={"MllamaCrossAttentionDecoderLayer": _looking},
        recipes={
            **LLAMA_RECIPES,
            Role.QKV: QKV,
            Role.CROSS_Q: Take("cross_attn.q_proj"),
            Role.CROSS_KV: Stack(("cross_attn.k_proj", "cross_attn.v_proj")),
            Role.CROSS_OUT: Take("cross_attn.o_proj"),
            Role.Q_NORM: Take("cross_attn.q_norm"),
            Role.K_NORM: Take("cross_attn.k_norm"),
        },
        courses={_LOOKS: OwnCourse(_look, _GATES, _READS, needs=_NEEDS)},
        unread=_READS,  # layers without cross-attention receive these arguments, too
        frame=_frame,
        tiny=(
            tiny(
                "MllamaForCausalLM",
                "MllamaTextConfig",
                label="without pictures",
                cross_attention_layers=[],
                **_ROPE,
            ),
            tiny(
                "MllamaForCausalLM", "MllamaTextConfig", label="unasked", cross_attention_layers=[1], **_ROPE
            ),
        ),
    ),
    Family(
        name="mllama_vision_model",
        layers=("MllamaVisionEncoderLayer",),
        spec=_first,
        measure=_tower,
        recipes={
            **{role: recipe for role, recipe in LLAMA_RECIPES.items() if role is not Role.MLP_IN},
            Role.MLP_IN: Take("mlp.fc1"),
            Role.MLP_OUT: Take("mlp.fc2"),
        },
        courses={_GATED: OwnCourse(_gated, ("gate_attn", "gate_ffn"))},
        tiny=(Tiny("MllamaVisionModel", "MllamaVisionConfig", _TOWER),),
    ),
)
