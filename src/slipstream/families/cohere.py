"""Cohere (Command R): one LayerNorm without bias for two parallel branches, rotary over neighbouring dims."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, QK_NORMS, llama_frame, llama_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, QKNorm


def _spec(config: Config, index: int) -> BlockSpec:
    norm = Norm("layer", config.layer_norm_eps)
    return llama_like(
        config,
        index,
        norm=norm,
        parallel=True,
        rope=rope(config, interleaved=True, table="pairs"),
        qk_norm=QKNorm(norm) if config.use_qk_norm else None,
    )


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=Norm("layer", config.layer_norm_eps), logit_scale=config.logit_scale)


FAMILY = Family(
    name="cohere",
    layers=("CohereDecoderLayer",),
    spec=_spec,
    recipes={**LLAMA_RECIPES, **QK_NORMS},
    frame=_frame,
    tiny=(
        tiny("CohereForCausalLM", "CohereConfig"),
        tiny(
            "CohereForCausalLM",
            "CohereConfig",
            label="norm per head, biases",
            use_qk_norm=True,
            attention_bias=True,
        ),
    ),
)
