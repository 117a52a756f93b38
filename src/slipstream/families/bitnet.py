"""BitNet b1.58: llama's layer with a norm before each branch's last matrix."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, inner_norms=True)


FAMILY = Family(
    name="bitnet",
    layers=("BitNetDecoderLayer",),
    spec=_spec,
    recipes={
        **LLAMA_RECIPES,
        Role.ATTN_INNER_NORM: Take("self_attn.attn_sub_norm"),
        Role.MLP_INNER_NORM: Take("mlp.ffn_sub_norm"),
    },
    frame=llama_frame,
    tiny=(
        tiny("BitNetForCausalLM", "BitNetConfig"),
        tiny("BitNetForCausalLM", "BitNetConfig", label="biases", attention_bias=True, hidden_act="silu"),
    ),
)
