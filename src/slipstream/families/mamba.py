"""Mamba, Falcon Mamba and Mamba 2: a layer is one state space."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slipstream.families.common import llama_frame, own_mixer, tiny
from slipstream.families.family import Config, Family, OwnMixer
from slipstream.families.recurrences import SELECTIVE, STATE_SPACE, mamba_2, selective
from slipstream.spec import BlockSpec, FrameSpec, Norm, Recurrence, Role
from slipstream.weights.recipe import Take

_STATE = "a state space"


def _layer(config: Config, recurrence: Recurrence | None) -> BlockSpec:
    return BlockSpec(
        hidden=config.hidden_size,
        heads=1,
        kv_heads=1,
        head_dim=config.hidden_size,
        ffn=0,
        norm=Norm("rms", config.layer_norm_epsilon),
        branches="attention",
        mixer=_STATE,
        recurrence=recurrence,
        wide=config.residual_in_fp32,
    )


def _mamba(config: Config, index: int) -> BlockSpec:
    return _layer(config, _selective(config))


def _falcon(config: Config, index: int) -> BlockSpec:
    return _layer(config, _selective(config, Norm("rms", config.mixer_rms_eps)))


def _mamba2(config: Config, index: int) -> BlockSpec:
    return _layer(config, _space(config))


def _selective(config: Config, norm: Norm | None = None) -> Recurrence | None:
    if config.hidden_act != "silu" or config.use_bias:
        return None
    return selective(
        channels=config.intermediate_size,
        keys=config.state_size,
        rank=int(config.time_step_rank),
        width=config.conv_kernel,
        norm=norm,
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


_TINY_2: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
_TINY: dict[str, Any] = {
    "state_size": 8,
    "time_step_rank": 6,
    "intermediate_size": 128,
    "num_hidden_layers": 2,  # each layer multiplies rounding errors, in the original as well
}


def _family(
    name: str, prefix: str, spec: Any, mixer: OwnMixer, *variants: tuple[str, dict[str, Any]]
) -> Family:
    return Family(
        name=name,
        layers=(f"{prefix}Block",),
        spec=spec,
        frame=_frame,
        recipes={Role.ATTN_NORM: Take("norm")},
        mixers={_STATE: mixer},
        tiny=tuple(
            tiny(f"{prefix}ForCausalLM", f"{prefix}Config", label=label, **options)
            for label, options in variants
        ),
    )


_SELECTIVE = own_mixer("mixer", recurrent=SELECTIVE)
_NARROW = {"residual_in_fp32": False}

FAMILIES = (
    _family(
        "mamba",
        "Mamba",
        _mamba,
        _SELECTIVE,
        ("", _TINY),
        ("no bias of the convolution", {**_TINY, **_NARROW, "use_conv_bias": False}),
    ),
    _family("falcon_mamba", "FalconMamba", _falcon, _SELECTIVE, ("", _TINY)),
    _family(
        "mamba2",
        "Mamba2",
        _mamba2,
        own_mixer("mixer", recurrent=STATE_SPACE),
        ("", _TINY_2),
        ("steps bounded", {**_TINY_2, **_NARROW, "time_step_limit": (0.05, math.inf)}),
    ),
)
