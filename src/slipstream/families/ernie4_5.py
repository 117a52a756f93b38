"""ERNIE 4.5, dense: llama with rotary over neighbouring dims, and optional biases."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, rope=rope(config, interleaved=True))


FAMILY = Family(
    name="ernie4_5",
    layers=("Ernie4_5DecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("Ernie4_5ForCausalLM", "Ernie4_5Config", head_dim=24),
        tiny(
            "Ernie4_5ForCausalLM",
            "Ernie4_5Config",
            label="biases, untied",
            head_dim=16,
            use_bias=True,
            tie_word_embeddings=False,
        ),
    ),
)
