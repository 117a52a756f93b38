"""Helium: llama with rotary over neighbouring dims."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, rope=rope(config, interleaved=True))


FAMILY = Family(
    name="helium",
    layers=("HeliumDecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("HeliumForCausalLM", "HeliumConfig", head_dim=16),
        tiny(
            "HeliumForCausalLM",
            "HeliumConfig",
            label="biases",
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
)
