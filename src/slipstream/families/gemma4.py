"""Gemma 4's language model: layers that borrow keys and values, and a separate input for each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from slipstream.families.common import (
    QK_NORMS,
    SANDWICH_RECIPES,
    field,
    layer_type,
    llama_frame,
    llama_like,
    tiny,
    window,
)
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, LayerInputs, MoE, Norm, QKNorm, Role, Rope
from slipstream.weights.recipe import First, Stack, Take

__all__ = ["QKV_SHARED", "layer_inputs", "sharing"]

QKV_SHARED = First(
    tuple(Stack(tuple(f"self_attn.{part}_proj" for part in parts)) for parts in ("qkv", "qk", "q"))
)
"""Recipe for QKV, also if values are the keys, or keys and values come from another layer."""


_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def sharing(config: Config, index: int) -> Literal["own", "lends", "borrows"]:
    """Return how a layer shares keys and values: the last ones borrow from the last before of their type."""
    kinds, first = config.layer_types, config.num_hidden_layers - config.num_kv_shared_layers
    if index >= first:
        return "borrows"
    last = kinds[index] not in kinds[index + 1 : first]
    return "lends" if last and first < config.num_hidden_layers else "own"


def _spec(config: Config, index: int) -> BlockSpec:
    kind, own = layer_type(config, index), config.per_layer_config[index]
    norm, shares = Norm("rms", config.rms_norm_eps), sharing(config, index)
    width = config.intermediate_size * (2 if config.use_double_wide_mlp and shares == "borrows" else 1)
    changes: dict[str, Any] = {"ffn": width}
    if field(config, "enable_moe_block", default=False):
        moe = MoE(
            config.num_experts,
            config.top_k_experts,
            normalize=True,
            shared=width,
            beside=True,
            router_scale=config.hidden_size**-0.5,
        )
        changes = {"ffn": config.moe_intermediate_size, "moe": moe}
    alike = config.attention_k_eq_v and kind != "sliding_attention" and shares != "borrows"
    return llama_like(
        own,
        index,
        head_dim=own.head_dim,
        kv_heads=own.num_key_value_heads,
        activation=config.hidden_activation,
        qk_norm=QKNorm(norm),
        value_norm=shares != "borrows",
        values="keys" if alike else "own",
        sharing=shares,
        rope=Rope(own.head_dim, layer_type=kind),
        window=window(config, index),
        scale=1.0,
        inputs=int(field(config, "hidden_size_per_layer_input", default=0)),
        **changes,
    )


def layer_inputs(config: Config, rows: int | None = None) -> LayerInputs | None:
    """Return how the layers' own inputs are made, `rows` as of `LayerInputs`; None if they have none."""
    width = int(field(config, "hidden_size_per_layer_input", default=0))
    if not width:
        return None
    return LayerInputs(
        embed="model.embed_tokens_per_layer",
        project="model.per_layer_model_projection",
        norm="model.per_layer_projection_norm",
        width=width,
        embed_scale=width**0.5,
        project_scale=config.hidden_size**-0.5,
        scale=2.0**-0.5,
        rows=rows,
    )


def _frame(config: Config) -> FrameSpec:
    return llama_frame(
        config,
        embed_scale=config.hidden_size**0.5,
        embed_scale_rounded=True,
        logit_softcap=config.final_logit_softcapping,
        inputs=layer_inputs(config),
        placeholder_fields=_PLACEHOLDERS,
        stand_in=config.pad_token_id or 0,
    )


def _unified_frame(config: Config) -> FrameSpec:
    return replace(_frame(config), inputs=None)


def _unified(config: Config, index: int) -> BlockSpec:
    return replace(_spec(config, index), inputs=0)


def _refuse(config: Config) -> str | None:
    if config.use_bidirectional_attention == "all":
        return "use_bidirectional_attention is 'all'"
    return None


_TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


_EXPERTS: dict[str, Any] = {
    **_TINY,
    "num_kv_shared_layers": 2,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}


def _family(name: str, prefix: str, spec: Any, frame: Any, *, experts: bool) -> Family:
    built = f"{prefix}ForCausalLM", f"{prefix}TextConfig"
    return Family(
        name=name,
        layers=(f"{prefix}TextDecoderLayer",),
        spec=spec,
        frame=frame,
        recipes={
            **SANDWICH_RECIPES,
            **QK_NORMS,
            Role.QKV: QKV_SHARED,
            Role.INPUT_GATE: Take("per_layer_input_gate"),
            Role.INPUT_OUT: Take("per_layer_projection"),
            Role.INPUT_NORM: Take("post_per_layer_input_norm"),
            Role.LAYER_SCALE: Take("layer_scalar"),
            Role.ROUTER: Take("router.proj"),
            Role.SHARED_IN: SANDWICH_RECIPES[Role.MLP_IN],
            Role.SHARED_OUT: SANDWICH_RECIPES[Role.MLP_OUT],
            Role.EXPERTS_IN: Take("experts.gate_up_proj"),
            Role.EXPERTS_OUT: Take("experts.down_proj"),
            Role.ROUTER_NORM: Take("router.scale"),
            Role.EXPERTS_SCALE: Take("router.per_expert_scale"),
            Role.EXPERTS_NORM: Take("pre_feedforward_layernorm_2"),
            Role.EXPERTS_POST_NORM: Take("post_feedforward_layernorm_2"),
            Role.SHARED_POST_NORM: Take("post_feedforward_layernorm_1"),
        },
        refuse=_refuse,
        tiny=(
            tiny(*built, label="shared", num_kv_shared_layers=2, use_double_wide_mlp=True, **_TINY),
            tiny(*built, label="keys as values", attention_k_eq_v=True, **_TINY),
            tiny(*built, label="no own inputs", **{**_TINY, "hidden_size_per_layer_input": 0}),
            *((tiny(*built, label="experts", **_EXPERTS),) if experts else ()),
        ),
    )


FAMILIES = (
    _family("gemma4_text", "Gemma4", _spec, _frame, experts=True),
    _family("gemma4_unified_text", "Gemma4Unified", _unified, _unified_frame, experts=False),
)
