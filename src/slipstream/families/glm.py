"""GLM-4 (2024): llama with half of each head rotary, in neighbouring pairs, and gate and up in one matrix."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, rope=rope(config, interleaved=True))


FAMILY = Family(
    name="glm",
    layers=("GlmDecoderLayer",),
    spec=_spec,
    recipes={**LLAMA_RECIPES, Role.MLP_IN: Take("mlp.gate_up_proj")},
    frame=llama_frame,
    tiny=(
        tiny("GlmForCausalLM", "GlmConfig", head_dim=16),
        tiny(
            "GlmForCausalLM",
            "GlmConfig",
            label="whole head, no biases",
            head_dim=24,
            partial_rotary_factor=1.0,
            attention_bias=False,
        ),
    ),
)
