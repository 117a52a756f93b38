"""Gemma: llama with norm weights stored minus one, and embeddings times the root of the width."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm


def _norm(config: Config) -> Norm:
    return Norm("rms", config.rms_norm_eps, offset=1.0)


def _spec(config: Config, index: int) -> BlockSpec:
    # A vision model passes its language model the masks, which make the prompt bidirectional.
    return llama_like(config, index, norm=_norm(config), causal=not config.use_bidirectional_attention)


def _frame(config: Config) -> FrameSpec | None:
    if config.use_bidirectional_attention:
        return None
    return llama_frame(
        config, norm=_norm(config), embed_scale=config.hidden_size**0.5, embed_scale_rounded=True
    )


FAMILY = Family(
    name="gemma",
    layers=("GemmaDecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    frame=_frame,
    tiny=(
        tiny("GemmaForCausalLM", "GemmaConfig", head_dim=24),
        tiny(
            "GemmaForCausalLM",
            "GemmaConfig",
            label="biases, untied",
            head_dim=16,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        tiny("GemmaForCausalLM", "GemmaConfig", label="bidirectional", use_bidirectional_attention=True),
    ),
)
