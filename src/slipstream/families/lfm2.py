"""LFM2, with experts or without, and LFM3: attention in some layers, short convolutions in others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import (
    LLAMA_RECIPES,
    layer_type,
    llama_frame,
    llama_like,
    own_mixer,
    rope,
    tiny,
    window,
)
from slipstream.families.family import Config, Family
from slipstream.families.recurrences import SHORT_CONVOLUTION, short_convolution
from slipstream.spec import BlockSpec, FrameSpec, Gate, MoE, Norm, QKNorm, Role
from slipstream.weights.recipe import First, Stack, Take

_CONVOLUTION = "a short convolution"


def _layer(config: Config, index: int, **changes: Any) -> BlockSpec:
    norm = Norm("rms", config.norm_eps)
    spec = llama_like(config, index, norm=norm, qk_norm=QKNorm(norm), activation="silu", **changes)
    if config.layer_types[index] == "conv":
        recurrence = short_convolution(config.hidden_size, config.conv_L_cache)
        return replace(spec, mixer=_CONVOLUTION, recurrence=recurrence, rope=None, gate=None)
    return spec


def _frame(config: Config, rotary: str = "model.rotary_emb") -> FrameSpec | None:
    # With a bias, padding on the left of a prompt is no longer zeros behind the projection.
    if config.conv_bias and "conv" in config.layer_types:
        return None
    norm = Norm("rms", config.norm_eps)
    return llama_frame(config, norm=norm, final_norm="model.embedding_norm", rotary=rotary)


def _moe_frame(config: Config) -> FrameSpec | None:
    return _frame(config, "model.pos_emb")


def _lfm2(config: Config, index: int) -> BlockSpec:
    width, multiple = config.intermediate_size, config.block_multiple_of
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            width = multiple * -(-width // multiple)
    return _layer(config, index, ffn=width)


def _moe(config: Config, index: int) -> BlockSpec:
    if index < config.num_dense_layers:
        return _layer(config, index)
    moe = MoE(
        config.num_experts,
        config.num_experts_per_tok,
        scoring="sigmoid",
        normalize=bool(config.norm_topk_prob),
        more_sum=1e-6,
        factor=float(config.routed_scaling_factor),
    )
    return _layer(config, index, ffn=config.moe_intermediate_size, moe=moe)


def _lfm3(config: Config, index: int) -> BlockSpec:
    gate = Gate(per="head") if config.use_attention_gate else None
    kind = layer_type(config, index)
    return _layer(config, index, gate=gate, window=window(config, index), rope=rope(config, layer_type=kind))


_LFM2 = {
    Role.ATTN_NORM: Take("operator_norm"),
    Role.QKV: LLAMA_RECIPES[Role.QKV],
    Role.Q_NORM: Take("self_attn.q_layernorm"),
    Role.K_NORM: Take("self_attn.k_layernorm"),
    Role.ATTN_OUT: Take("self_attn.out_proj"),
    Role.MLP_NORM: Take("ffn_norm"),
    Role.MLP_IN: Stack(("feed_forward.w1", "feed_forward.w3")),
    Role.MLP_OUT: Take("feed_forward.w2"),
}
_MIXERS = {_CONVOLUTION: own_mixer("conv", cache="past_key_values", recurrent=SHORT_CONVOLUTION)}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_dense_layers": 1,
}
_GATED: dict[str, Any] = {"head_dim": 16, "sliding_window": 5}

FAMILIES = (
    Family(
        name="lfm2",
        layers=("Lfm2DecoderLayer",),
        spec=_lfm2,
        recipes=_LFM2,
        mixers=_MIXERS,
        frame=_frame,
        tiny=(
            tiny("Lfm2ForCausalLM", "Lfm2Config", layer_types=["full_attention"] * 3, block_multiple_of=8),
            tiny(
                "Lfm2ForCausalLM",
                "Lfm2Config",
                label="convolutions",
                layer_types=["conv", "full_attention", "conv"],
                block_multiple_of=8,
            ),
            tiny(
                "Lfm2ForCausalLM",
                "Lfm2Config",
                label="width as given",
                layer_types=["full_attention"] * 3,
                block_auto_adjust_ff_dim=False,
            ),
        ),
    ),
    Family(
        name="lfm2_moe",
        layers=("Lfm2MoeDecoderLayer",),
        spec=_moe,
        recipes={
            **_LFM2,
            Role.ROUTER: Take("feed_forward.gate"),
            Role.ROUTER_BIAS: Take("feed_forward.expert_bias"),
            Role.EXPERTS_IN: Take("feed_forward.experts.gate_up_proj"),
            Role.EXPERTS_OUT: Take("feed_forward.experts.down_proj"),
        },
        mixers=_MIXERS,
        frame=_moe_frame,
        tiny=(
            tiny(
                "Lfm2MoeForCausalLM",
                "Lfm2MoeConfig",
                layer_types=["conv", "full_attention", "conv"],
                **_EXPERTS,
            ),
            tiny(
                "Lfm2MoeForCausalLM",
                "Lfm2MoeConfig",
                label="no correction, scaled",
                layer_types=["full_attention", "conv", "full_attention"],
                use_expert_bias=False,
                norm_topk_prob=False,
                routed_scaling_factor=1.5,
                **_EXPERTS,
            ),
        ),
    ),
    Family(
        name="lfm3",
        layers=("Lfm3DecoderLayer",),
        spec=_lfm3,
        recipes={
            **_LFM2,
            Role.QKV: First(
                (
                    Stack(tuple(f"self_attn.{part}_proj" for part in "qkvg")),
                    LLAMA_RECIPES[Role.QKV],
                )
            ),
            Role.Q_NORM: Take("self_attn.q_norm"),
            Role.K_NORM: Take("self_attn.k_norm"),
            Role.ATTN_OUT: Take("self_attn.o_proj"),
            Role.ATTN_POST_NORM: Take("post_operator_norm"),
            Role.MLP_POST_NORM: Take("post_ffn_norm"),
        },
        mixers=_MIXERS,
        frame=_frame,
        tiny=(
            tiny(
                "Lfm3ForCausalLM",
                "Lfm3Config",
                layer_types=["conv", "full_attention", "sliding_attention"],
                **_GATED,
            ),
            tiny(
                "Lfm3ForCausalLM",
                "Lfm3Config",
                label="no gate, two norms",
                layer_types=["conv", "full_attention", "sliding_attention"],
                use_attention_gate=False,
                use_sandwich_norm=False,
                **_GATED,
            ),
        ),
    ),
)
