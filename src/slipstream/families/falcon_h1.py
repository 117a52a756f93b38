"""Falcon-H1: attention and a state space in parallel in every layer, with many multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.families.common import LLAMA_RECIPES, llama_like, own_mixer, tiny
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Stack, Take

_STATE = "a state space"
_MAMBA = own_mixer("mamba", mask="mamba_attention_mask")


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, course=_STATE)


def _beside(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    normed = heads.norm(Role.ATTN_NORM, x)
    kept = _MAMBA.call(layer.mamba, normed, given) * layer.ssm_out_multiplier
    attended = heads.attend(normed * layer.attention_in_multiplier, keys=layer.self_attn.key_multiplier)
    x = x + (kept + attended * layer.attn_out_multiplier)
    mlp = layer.feed_forward
    gate, up = heads.linear(Role.MLP_IN, heads.norm(Role.MLP_NORM, x)).chunk(2, dim=-1)
    fed = heads.linear(Role.MLP_OUT, up * mlp.act_fn(gate * mlp.gate_multiplier))
    out: Tensor = x + fed * mlp.down_multiplier
    return out


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
    courses={_STATE: OwnCourse(_beside, ("mamba",), _MAMBA.reads, note=_STATE)},
    tiny=(
        tiny("FalconH1ForCausalLM", "FalconH1Config", **_TINY),
        tiny(
            "FalconH1ForCausalLM",
            "FalconH1Config",
            label="multipliers, biases",
            attention_bias=True,
            mlp_bias=True,
            key_multiplier=0.4,
            attention_in_multiplier=1.3,
            attention_out_multiplier=0.7,
            ssm_out_multiplier=0.6,
            mlp_multipliers=[0.8, 1.4],
            **_TINY,
        ),
    ),
)
