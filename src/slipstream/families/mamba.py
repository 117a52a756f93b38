"""Mamba 2: a layer is one state space."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slipstream.families.common import llama_frame, own_mixer, tiny
from slipstream.families.family import Config, Family
from slipstream.families.recurrences import STATE_SPACE, mamba_2
from slipstream.spec import BlockSpec, FrameSpec, Norm, Recurrence, Role
from slipstream.weights.recipe import Take

_STATE = "a state space"


def _spec(config: Config, index: int) -> BlockSpec:
    return BlockSpec(
        hidden=config.hidden_size,
        heads=1,
        kv_heads=1,
        head_dim=config.hidden_size,
        ffn=0,
        norm=Norm("rms", config.layer_norm_epsilon),
        branches="attention",
        mixer=_STATE,
        recurrence=_space(config),
        wide=config.residual_in_fp32,
    )


def _space(config: Config) -> Recurrence | None:
    low, high = config.time_step_limit
    if config.hidden_act != "silu" or config.use_bias or high != math.inf:
        return None
    space = mamba_2(
        heads=config.num_heads,
        groups=config.n_groups,
        values=config.head_dim,
        keys=config.state_size,
        width=config.conv_kernel,
        eps=config.layer_norm_epsilon,
    )
    return replace(space, least_step=float(low))


def _frame(config: Config) -> FrameSpec:
    return llama_frame(
        config,
        layers="backbone.layers",
        embed="backbone.embeddings",
        final_norm="backbone.norm_f",
        norm=Norm("rms", config.layer_norm_epsilon),
        rotary=None,
    )


_TINY: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
_BUILT = "Mamba2ForCausalLM", "Mamba2Config"

FAMILY = Family(
    name="mamba2",
    layers=("Mamba2Block",),
    spec=_spec,
    frame=_frame,
    recipes={Role.ATTN_NORM: Take("norm")},
    mixers={_STATE: own_mixer("mixer", recurrent=STATE_SPACE)},
    tiny=(
        tiny(*_BUILT, **_TINY),
        tiny(
            *_BUILT, label="steps bounded", residual_in_fp32=False, time_step_limit=(0.05, math.inf), **_TINY
        ),
    ),
)
