"""RecurrentGemma (Griffin): windowed attention in some layers, recurrences (not fused) in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.families.common import llama_like, rope, tiny, window
from slipstream.families.family import Config, Family, OwnMixer
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take

_RECURRENCE = "a linear recurrence"


def _spec(config: Config, index: int) -> BlockSpec:
    spec = llama_like(
        config,
        index,
        norm=Norm("rms", config.rms_norm_eps, offset=1.0),
        ffn=config.intermediate_size // 2,
        activation=config.hidden_activation,
        rope=rope(config),
        window=window(config, index),
    )
    if config.layers_block_type[index] in ("linear_attention", "recurrent"):
        return replace(spec, mixer=_RECURRENCE, rope=None, window=None)
    return spec


def _recur(mixer: Any, x: Any, given: Mapping[str, Any]) -> Any:
    passed = {name: given[name] for name in ("position_ids", "attention_mask", "use_cache") if name in given}
    return mixer(x, **passed)[0]


FAMILY = Family(
    name="recurrent_gemma",
    layers=("RecurrentGemmaDecoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("temporal_pre_norm"),
        Role.QKV: Stack(tuple(f"temporal_block.{part}_proj" for part in "qkv")),
        Role.ATTN_OUT: Take("temporal_block.o_proj"),
        Role.MLP_NORM: Take("channel_pre_norm"),
        Role.MLP_IN: Stack(("mlp_block.gate_proj", "mlp_block.up_proj")),
        Role.MLP_OUT: Take("mlp_block.down_proj"),
    },
    rotary="temporal_block.rotary_emb",
    mixers={_RECURRENCE: OwnMixer("temporal_block", _recur)},
    tiny=(
        tiny(
            "RecurrentGemmaForCausalLM",
            "RecurrentGemmaConfig",
            lru_width=64,
            attention_window_size=6,
            block_types=["recurrent", "attention"],
        ),
        tiny(
            "RecurrentGemmaForCausalLM",
            "RecurrentGemmaConfig",
            label="attention alone, biases",
            lru_width=64,
            attention_window_size=6,
            attention_bias=True,
            block_types=["attention"],
        ),
    ),
)
