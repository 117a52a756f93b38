"""Cohere 2 (Command R7B, Command A): Cohere with windowed layers; only those are rotary."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_windowed, rope, tiny, window
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_windowed(
        config,
        index,
        norm=Norm("layer", config.layer_norm_eps),
        parallel=True,
        rope=rope(config, interleaved=True, table="pairs") if window(config, index) else None,
    )


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=Norm("layer", config.layer_norm_eps), logit_scale=config.logit_scale)


FAMILY = Family(
    name="cohere2",
    layers=("Cohere2DecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    frame=_frame,
    tiny=(
        tiny("Cohere2ForCausalLM", "Cohere2Config", sliding_window=5, sliding_window_pattern=3),
        tiny(
            "Cohere2ForCausalLM",
            "Cohere2Config",
            label="biases",
            sliding_window=6,
            sliding_window_pattern=2,
            attention_bias=True,
        ),
    ),
)
