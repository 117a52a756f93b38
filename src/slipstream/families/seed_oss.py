"""Seed-OSS: llama with biases on q, k and v."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Family

FAMILY = Family(
    name="seed_oss",
    layers=("SeedOssDecoderLayer",),
    spec=llama_like,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("SeedOssForCausalLM", "SeedOssConfig", head_dim=24),
        tiny(
            "SeedOssForCausalLM",
            "SeedOssConfig",
            label="biases throughout",
            head_dim=16,
            attention_out_bias=True,
            mlp_bias=True,
        ),
    ),
)
