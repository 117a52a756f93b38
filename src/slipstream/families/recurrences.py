"""Recurrences of several families, as numbers and as names of tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slipstream.families.common import field
from slipstream.families.family import Config, RecurrentParts
from slipstream.spec import Norm, Place, Recurrence

__all__ = [
    "DELTA_APART",
    "DELTA_BY_HEAD",
    "DELTA_BY_KIND",
    "SHORT_CONVOLUTION",
    "SELECTIVE",
    "STATE_SPACE",
    "delta_rule",
    "mamba_2",
    "selective",
    "short_convolution",
    "state_space",
]

SHORT_CONVOLUTION = RecurrentParts(projections=("in_proj",), convolution="conv", last="out_proj")
_DELTA = {"speed": "A_log", "shift": "dt_bias", "norm": "norm.weight"}
DELTA_BY_HEAD = RecurrentParts(("in_proj_qkvz", "in_proj_ba"), "conv1d", "out_proj", **_DELTA)
DELTA_BY_KIND = RecurrentParts(
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "conv1d", "out_proj", **_DELTA
)
DELTA_APART = RecurrentParts(
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
    "conv1d",
    "o_proj",
    **{**_DELTA, "norm": "o_norm.weight"},
)
STATE_SPACE = RecurrentParts(
    ("in_proj",), "conv1d", "out_proj", speed="A_log", shift="dt_bias", skip="D", norm="norm.weight"
)

SELECTIVE = RecurrentParts(
    ("in_proj",), "conv1d", "out_proj", speed="A_log", skip="D", mixed="x_proj", steps="dt_proj"
)


def short_convolution(channels: int, width: int) -> Recurrence:
    """Return LFM2's gated convolution; a projected row is `[q | gate | v]`."""
    q, gate, v = (Place(index * channels) for index in range(3))
    return Recurrence("none", width, channels, q, v, gate)


def delta_rule(config: Config, *, by_head: bool) -> Recurrence | None:
    """Return the gated delta rule of Qwen3-Next's config fields.

    Args:
        config: The model's config.
        by_head: A projected row is `[q | k | v | gate]` of each key head, then `[rate | decay]` of each;
            otherwise q of all heads, then k, v, gate, rate and decay.

    Returns:
        None if the activation is another one.
    """
    if config.hidden_act != "silu":
        return None
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    wide, tall = config.linear_value_head_dim, config.linear_key_head_dim
    each = values // keys
    sizes = {"q": tall, "k": tall, "v": each * wide, "gate": each * wide, "rate": each, "decay": each}
    channels = {"q": 0, "k": keys * tall, "v": 2 * keys * tall}
    places: dict[str, Any] = {}
    at = 0
    for group in (("q", "k", "v", "gate"), ("rate", "decay")):
        step = sum(sizes[name] for name in group)
        for name in group:
            places[name] = Place(at, step if by_head else sizes[name], channels.get(name, 0))
            at += sizes[name] * (1 if by_head else keys)
        at += step * (keys - 1) if by_head else 0
    return Recurrence(
        "delta",
        config.linear_conv_kernel_dim,
        2 * keys * tall + values * wide,
        key_heads=keys,
        value_heads=values,
        key_dim=tall,
        value_dim=wide,
        norm=Norm("rms", config.rms_norm_eps),
        norm_width=wide,
        **places,
    )


def state_space(config: Config) -> Recurrence | None:
    """Return the state space of Bamba's config fields.

    None if its activation is another one, or where a prompt's padding on the left reaches the convolution, or
    steps are bounded above.
    """
    low, high = field(config, "time_step_limit", default=(0.0, math.inf))
    if config.hidden_act != "silu" or config.mamba_proj_bias or high != math.inf:
        return None
    space = mamba_2(
        heads=config.mamba_n_heads,
        groups=config.mamba_n_groups,
        values=config.mamba_d_head,
        keys=config.mamba_d_state,
        width=config.mamba_d_conv,
        eps=config.rms_norm_eps,
    )
    return replace(space, least_step=float(low))


def mamba_2(*, heads: int, groups: int, values: int, keys: int, width: int, eps: float) -> Recurrence:
    """Return the state space of Mamba 2; a projected row is `[gate | v | k | q | decay]`.

    Args:
        heads: Heads of values (V).
        groups: Groups of heads that share keys and queries, Mamba's B and C.
        values: Width of a head's values.
        keys: Width of keys and queries, Mamba's size of the state.
        width: Tokens that the convolution covers.
        eps: Of the norm, which is over each group.
    """
    inner = heads * values
    decay = Place(2 * inner + 2 * groups * keys, heads // groups)
    return Recurrence(
        "space",
        width,
        inner + 2 * groups * keys,
        q=Place(2 * inner + groups * keys, keys, inner + groups * keys),
        k=Place(2 * inner, keys, inner),
        v=Place(inner, inner // groups, 0),
        gate=Place(0, inner // groups),
        rate=decay,
        decay=decay,
        key_heads=groups,
        value_heads=heads,
        key_dim=keys,
        value_dim=values,
        norm=Norm("rms", eps),
        norm_width=inner // groups,
        gate_first=True,
    )


def selective(*, channels: int, keys: int, rank: int, width: int, norm: Norm | None = None) -> Recurrence:
    """Return the selective state space of Mamba 1; a projected row is `[v | gate]`.

    Args:
        channels: Of the convolution and of the state.
        keys: Mamba's size of the state.
        rank: Width of the steps' inputs.
        width: Tokens that the convolution covers.
        norm: Of the steps' inputs, keys and queries.
    """
    v, gate = Place(0), Place(channels)
    return Recurrence(
        "selective",
        width,
        channels,
        q=v,
        v=v,
        gate=gate,
        key_heads=1,
        value_heads=1,
        key_dim=keys,
        value_dim=channels,
        rank=rank,
        inner_norm=norm,
    )
