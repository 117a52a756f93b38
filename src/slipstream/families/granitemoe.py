"""Granite-MoE, with and without shared experts: multipliers on embedding, branches, scores and logits."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, MoE, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(
        config,
        index,
        scale=config.attention_multiplier,
        residual_scale=config.residual_multiplier,
        moe=MoE(
            config.num_local_experts,
            config.num_experts_per_tok,
            scoring="topk_softmax",
            shared=getattr(config, "shared_intermediate_size", 0),
        ),
    )


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, embed_scale=config.embedding_multiplier, logit_scale=1 / config.logits_scaling)


_RECIPES = {
    **MOE_RECIPES,
    Role.ROUTER: Take("block_sparse_moe.router"),
    Role.EXPERTS_IN: Take("block_sparse_moe.experts.gate_up_proj"),
    Role.EXPERTS_OUT: Take("block_sparse_moe.experts.down_proj"),
    Role.SHARED_IN: Take("shared_mlp.input_linear"),
    Role.SHARED_OUT: Take("shared_mlp.output_linear"),
}
_TINY: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SCALED: dict[str, Any] = {
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
}

FAMILIES = (
    Family(
        name="granitemoe",
        layers=("GraniteMoeDecoderLayer",),
        spec=_spec,
        recipes=_RECIPES,
        frame=_frame,
        tiny=(
            tiny("GraniteMoeForCausalLM", "GraniteMoeConfig", **_SCALED, **_TINY),
            tiny(
                "GraniteMoeForCausalLM",
                "GraniteMoeConfig",
                label="biases, plain",
                attention_bias=True,
                **_TINY,
            ),
        ),
    ),
    Family(
        name="granitemoeshared",
        layers=("GraniteMoeSharedDecoderLayer",),
        spec=_spec,
        recipes=_RECIPES,
        frame=_frame,
        tiny=(
            tiny(
                "GraniteMoeSharedForCausalLM",
                "GraniteMoeSharedConfig",
                shared_intermediate_size=40,
                **_SCALED,
                **_TINY,
            ),
            tiny(
                "GraniteMoeSharedForCausalLM",
                "GraniteMoeSharedConfig",
                label="none shared",
                shared_intermediate_size=0,
                **_TINY,
            ),
        ),
    ),
)
