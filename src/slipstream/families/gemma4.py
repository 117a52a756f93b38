"""Gemma 4's language model: layers that borrow keys and values, an input of its own for each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from slipstream.families.common import (
    QK_NORMS,
    SANDWICH_RECIPES,
    field,
    layer_type,
    llama_like,
    tiny,
    window,
)
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm, Role, Rope
from slipstream.weights.recipe import First, Stack, Take

__all__ = ["QKV_SHARED", "sharing"]

QKV_SHARED = First(
    tuple(Stack(tuple(f"self_attn.{part}_proj" for part in parts)) for parts in ("qkv", "qk", "q"))
)
"""With values that are keys, and with keys and values that are another layer's."""


def sharing(config: Config, index: int) -> Literal["own", "lends", "borrows"]:
    """The last layers borrow from the last one of their type before them."""
    kinds, first = config.layer_types, config.num_hidden_layers - config.num_kv_shared_layers
    if index >= first:
        return "borrows"
    last = kinds[index] not in kinds[index + 1 : first]
    return "lends" if last and first < config.num_hidden_layers else "own"


def _spec(config: Config, index: int) -> BlockSpec:
    kind, own = layer_type(config, index), config.per_layer_config[index]
    norm, shares = Norm("rms", config.rms_norm_eps), sharing(config, index)
    alike = config.attention_k_eq_v and kind != "sliding_attention" and shares != "borrows"
    return llama_like(
        own,
        index,
        head_dim=own.head_dim,
        kv_heads=own.num_key_value_heads,
        ffn=config.intermediate_size * (2 if config.use_double_wide_mlp and shares == "borrows" else 1),
        activation=config.hidden_activation,
        qk_norm=QKNorm(norm),
        value_norm=shares != "borrows",
        values="keys" if alike else "own",
        sharing=shares,
        rope=Rope(own.head_dim, layer_type=kind),
        window=window(config, index),
        scale=1.0,
        inputs=int(field(config, "hidden_size_per_layer_input", default=0)),
    )


def _unified(config: Config, index: int) -> BlockSpec:
    return replace(_spec(config, index), inputs=0)


def _refuse(config: Config) -> str | None:
    if field(config, "enable_moe_block", default=False):
        return "its experts stand beside a feed-forward"
    if config.use_bidirectional_attention == "all":
        return "it is not causal"
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


def _family(name: str, prefix: str, spec: Any) -> Family:
    built = f"{prefix}ForCausalLM", f"{prefix}TextConfig"
    return Family(
        name=name,
        layers=(f"{prefix}TextDecoderLayer",),
        spec=spec,
        recipes={
            **SANDWICH_RECIPES,
            **QK_NORMS,
            Role.QKV: QKV_SHARED,
            Role.INPUT_GATE: Take("per_layer_input_gate"),
            Role.INPUT_OUT: Take("per_layer_projection"),
            Role.INPUT_NORM: Take("post_per_layer_input_norm"),
            Role.LAYER_SCALE: Take("layer_scalar"),
        },
        refuse=_refuse,
        tiny=(
            tiny(*built, label="shared", num_kv_shared_layers=2, use_double_wide_mlp=True, **_TINY),
            tiny(*built, label="keys as values", attention_k_eq_v=True, **_TINY),
            tiny(*built, label="no own inputs", **{**_TINY, "hidden_size_per_layer_input": 0}),
        ),
    )


FAMILIES = (
    _family("gemma4_text", "Gemma4", _spec),
    _family("gemma4_unified_text", "Gemma4Unified", _unified),
)
