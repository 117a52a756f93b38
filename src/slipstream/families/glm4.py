"""GLM-4-0414: GLM with norms before and after each branch."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, rope=rope(config, interleaved=True))


FAMILY = Family(
    name="glm4",
    layers=("Glm4DecoderLayer",),
    spec=_spec,
    recipes={
        **LLAMA_RECIPES,
        Role.ATTN_POST_NORM: Take("post_self_attn_layernorm"),
        Role.MLP_IN: Take("mlp.gate_up_proj"),
        Role.MLP_POST_NORM: Take("post_mlp_layernorm"),
    },
    frame=llama_frame,
    tiny=(
        tiny("Glm4ForCausalLM", "Glm4Config", head_dim=16),
        tiny("Glm4ForCausalLM", "Glm4Config", label="no biases", head_dim=24, attention_bias=False),
    ),
)
