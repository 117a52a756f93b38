"""Gemma: llama with norm weights stored less one, and embeddings times the root of the width."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm


def _norm(config: Config) -> Norm:
    return Norm("rms", config.rms_norm_eps, offset=1.0)


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, norm=_norm(config))


def _frame(config: Config) -> FrameSpec:
    return llama_frame(
        config, norm=_norm(config), embed_scale=config.hidden_size**0.5, embed_scale_rounded=True
    )


def _refuse(config: Config) -> str | None:
    return "bidirectional attention" if config.use_bidirectional_attention else None


FAMILY = Family(
    name="gemma",
    layers=("GemmaDecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    frame=_frame,
    refuse=_refuse,
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
    ),
)
