"""GPT-OSS: sinks, biases everywhere, alternating windows, and experts whose gate and up rows alternate."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, field, llama_frame, llama_windowed, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Role
from slipstream.weights.feed_forward import Alternating
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_windowed(
        config,
        index,
        activation="swiglu_oai",
        sinks=True,
        rope=rope(config, table="half"),
        moe=MoE(config.num_local_experts, config.num_experts_per_tok, scoring="topk_softmax"),
    )


def _refuse(config: Config) -> str | None:
    found = field(config, "swiglu_alpha", default=1.702), field(config, "swiglu_limit", default=7.0)
    return None if found == (1.702, 7.0) else f"swiglu_alpha, swiglu_limit = {found}; the op has (1.702, 7.0)"


_TINY: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 5,
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

FAMILY = Family(
    name="gpt_oss",
    layers=("GptOssDecoderLayer",),
    spec=_spec,
    recipes={
        **MOE_RECIPES,
        Role.SINKS: Take("self_attn.sinks"),
        Role.ROUTER: Take("mlp.router"),
        Role.EXPERTS_IN: Alternating("mlp.experts.gate_up_proj", transposed=True),
        Role.EXPERTS_OUT: Take("mlp.experts.down_proj", transposed=True),
    },
    refuse=_refuse,
    frame=llama_frame,
    tiny=(
        tiny("GptOssForCausalLM", "GptOssConfig", rope_parameters=_YARN, **_TINY),
        tiny(
            "GptOssForCausalLM",
            "GptOssConfig",
            label="no bias",
            attention_bias=False,
            rope_parameters=_PLAIN,
            **_TINY,
        ),
    ),
)
