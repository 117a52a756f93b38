"""Llama and the models that share its layer to the letter."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Family

FAMILY = Family(
    name="llama",
    layers=("LlamaDecoderLayer",),
    spec=llama_like,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        tiny("LlamaForCausalLM", "LlamaConfig"),
        tiny("LlamaForCausalLM", "LlamaConfig", label="biases, tied", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
)
