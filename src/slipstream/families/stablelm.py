"""StableLM: llama with LayerNorm, part of a head rotary; parallel branches and head norms are optional."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, plain_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, QKNorm, Role
from slipstream.weights.recipe import Stack


def _spec(config: Config, index: int) -> BlockSpec:
    return plain_like(
        config,
        index,
        kv_heads=config.num_key_value_heads,
        gated=True,
        rope=rope(config),
        parallel=config.use_parallel_residual,
        qk_norm=QKNorm(Norm("layer", config.layer_norm_eps)) if config.qk_layernorm else None,
    )


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, norm=Norm("layer", config.layer_norm_eps))


FAMILY = Family(
    name="stablelm",
    layers=("StableLmDecoderLayer",),
    spec=_spec,
    recipes={
        **LLAMA_RECIPES,
        Role.Q_NORM: Stack(("self_attn.q_layernorm.norms.*",)),
        Role.K_NORM: Stack(("self_attn.k_layernorm.norms.*",)),
    },
    frame=_frame,
    tiny=(
        tiny("StableLmForCausalLM", "StableLmConfig", partial_rotary_factor=0.25),
        tiny(
            "StableLmForCausalLM",
            "StableLmConfig",
            label="biases",
            partial_rotary_factor=0.5,
            use_qkv_bias=True,
        ),
        tiny(
            "StableLmForCausalLM",
            "StableLmConfig",
            label="parallel, norm per head",
            use_parallel_residual=True,
            qk_layernorm=True,
        ),
    ),
)
