"""Falcon-H1: attention and a state space in parallel in every layer, with many multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, own_mixer, tiny
from slipstream.families.family import Config, Family
from slipstream.families.recurrences import STATE_SPACE, state_space
from slipstream.spec import BlockSpec, FrameSpec, Multipliers, Recurrence, Role
from slipstream.weights.recipe import Stack, Take

_STATE = "a state space"
_SPACE = replace(STATE_SPACE, scales="mup_vector")


def _spec(config: Config, index: int) -> BlockSpec:
    gate, feed_out = config.mlp_multipliers
    return llama_like(
        config,
        index,
        mixer=_STATE,
        recurrence=_space(config),
        beside=True,
        multipliers=Multipliers(
            attention_in=config.attention_in_multiplier,
            keys=config.key_multiplier,
            attention_out=config.attention_out_multiplier,
            mixer_out=config.ssm_out_multiplier,
            gate=gate,
            feed_out=feed_out,
        ),
    )


def _space(config: Config) -> Recurrence | None:
    space = state_space(config)
    if space is None:
        return None
    places: dict[str, Any] = {
        name: replace(getattr(space, name), scale=config.ssm_in_multiplier)
        for name in ("gate", "v", "k", "q", "decay")
    }
    if not config.mamba_rms_norm:
        return replace(space, **places, norm=None, norm_width=0)
    return replace(space, **places, gate_first=not config.mamba_norm_before_gate)


def _frame(config: Config) -> FrameSpec:
    return llama_frame(
        config,
        embed_scale=config.embedding_multiplier,
        logit_scale=config.lm_head_multiplier,
        final_norm="model.final_layernorm",
    )


_TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_BUILT = "FalconH1ForCausalLM", "FalconH1Config"
_SCALED: dict[str, Any] = {
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.8, 1.4],
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.5,
}

FAMILY = Family(
    name="falcon_h1",
    layers=("FalconH1DecoderLayer",),
    spec=_spec,
    recipes={
        **LLAMA_RECIPES,
        Role.MLP_NORM: Take("pre_ff_layernorm"),
        Role.MLP_IN: Stack(("feed_forward.gate_proj", "feed_forward.up_proj")),
        Role.MLP_OUT: Take("feed_forward.down_proj"),
    },
    mixers={_STATE: own_mixer("mamba", mask="mamba_attention_mask", recurrent=_SPACE)},
    frame=_frame,
    tiny=(
        tiny(*_BUILT, **_TINY),
        tiny(*_BUILT, label="multipliers", **{**_SCALED, **_TINY}),
        # With norms (mamba_rms_norm), transformers before 5.23 drops a dimension of single tokens.
        tiny(*_BUILT, label="biases", attention_bias=True, projectors_bias=True, **_TINY),
        tiny(*_BUILT, label="biases of gates, multipliers", mlp_bias=True, **{**_SCALED, **_TINY}),
    ),
)
