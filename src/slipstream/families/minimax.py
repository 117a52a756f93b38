"""MiniMax-Text-01: attention in some layers, lightning attention in others, experts in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_like, tiny
from slipstream.families.family import Config, Family, OwnMixer
from slipstream.spec import BlockSpec, MoE

_LINEAR = "linear attention"


def _factors(config: Config, index: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the factors of the residual and of the branch, for attention and for the experts."""
    kind = "linear" if config.layer_types[index] == "linear_attention" else "full"
    attention = getattr(config, f"{kind}_attn_alpha_factor"), getattr(config, f"{kind}_attn_beta_factor")
    return attention, (config.mlp_alpha_factor, config.mlp_beta_factor)


def _spec(config: Config, index: int) -> BlockSpec:
    linear = config.layer_types[index] == "linear_attention"
    carry, scale = _factors(config, index)[0]
    changes: dict[str, Any] = {"mixer": _LINEAR, "rope": None} if linear else {}
    return llama_like(
        config,
        index,
        residual_from="norm",
        carry=float(carry),
        residual_scale=float(scale),
        window=None if linear else config.sliding_window,
        moe=MoE(config.num_local_experts, config.num_experts_per_tok, normalize=True),
        **changes,
    )


def _refuse(config: Config) -> str | None:
    pairs = (_factors(config, index) for index in range(config.num_hidden_layers))
    differ = any(attention != experts for attention, experts in pairs)
    return "the residual factors of attention and experts differ" if differ else None


def _attend(mixer: Any, x: Any, given: Mapping[str, Any]) -> Any:
    names = ("position_embeddings", "attention_mask", "past_key_values")
    return mixer(hidden_states=x, **{name: given.get(name) for name in names})[0]


_TINY: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "block_size": 8,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
}
_SCALED = {
    f"{part}_{name}_factor": value
    for part in ("linear_attn", "full_attn", "mlp")
    for name, value in (("alpha", 1.7), ("beta", 0.8))
}

FAMILY = Family(
    name="minimax",
    layers=("MiniMaxDecoderLayer",),
    spec=_spec,
    recipes=MOE_RECIPES,
    refuse=_refuse,
    mixers={_LINEAR: OwnMixer("self_attn", _attend)},
    tiny=(
        tiny("MiniMaxForCausalLM", "MiniMaxConfig", **_TINY),
        tiny("MiniMaxForCausalLM", "MiniMaxConfig", label="factors", **_SCALED, **_TINY),
    ),
)
