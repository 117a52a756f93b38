"""Layers that attend in hybrids: LFM2, Granite 4, Bamba, Jamba. Those of the other kind keep their code."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import LLAMA_RECIPES, field, llama_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role
from slipstream.weights.recipe import Stack, Take


def _lfm2(config: Config, index: int) -> BlockSpec:
    width, multiple = config.intermediate_size, config.block_multiple_of
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            width = multiple * -(-width // multiple)
    norm = Norm("rms", config.norm_eps)
    return llama_like(config, index, norm=norm, qk_norm=QKNorm(norm), ffn=width, activation="silu")


def _lfm2_other(config: Config, index: int) -> str | None:
    return "the layer is a convolution" if config.layer_types[index] == "conv" else None


def _granite(config: Config, index: int) -> BlockSpec:
    experts = config.num_local_experts
    moe = MoE(
        experts,
        config.num_experts_per_tok,
        scoring="topk_softmax",
        shared=config.shared_intermediate_size,
    )
    return llama_like(
        config,
        index,
        scale=float(config.attention_multiplier),
        residual_scale=float(config.residual_multiplier),
        rope=rope(config) if config.position_embedding_type == "rope" else None,
        ffn=config.intermediate_size if experts else config.shared_intermediate_size,
        moe=moe if experts else None,
    )


def _granite_other(config: Config, index: int) -> str | None:
    kinds = field(config, "layer_types", "layers_block_type")
    return None if kinds[index] == "attention" or kinds[index] == "full_attention" else _STATE


def _bamba_other(config: Config, index: int) -> str | None:
    return None if index in config.attn_layer_indices else _STATE


def _jamba(config: Config, index: int) -> BlockSpec:
    counts = config.layers_num_experts
    experts = counts[index] if counts else 1
    moe = MoE(experts, config.num_experts_per_tok) if experts > 1 else None
    return llama_like(config, index, rope=None, moe=moe)


_STATE = "the layer is a state space"
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
_GRANITE = {
    **LLAMA_RECIPES,
    Role.MLP_IN: Take("shared_mlp.input_linear"),
    Role.MLP_OUT: Take("shared_mlp.output_linear"),
    Role.ROUTER: Take("block_sparse_moe.router"),
    Role.EXPERTS_IN: Take("block_sparse_moe.experts.gate_up_proj"),
    Role.EXPERTS_OUT: Take("block_sparse_moe.experts.down_proj"),
    Role.SHARED_IN: Take("shared_mlp.input_linear"),
    Role.SHARED_OUT: Take("shared_mlp.output_linear"),
}
_JAMBA = {
    **LLAMA_RECIPES,
    Role.MLP_NORM: Take("pre_ff_layernorm"),
    Role.MLP_IN: Stack(("feed_forward.gate_proj", "feed_forward.up_proj")),
    Role.MLP_OUT: Take("feed_forward.down_proj"),
    Role.ROUTER: Take("feed_forward.router"),
    Role.EXPERTS_IN: Take("feed_forward.experts.gate_up_proj"),
    Role.EXPERTS_OUT: Take("feed_forward.experts.down_proj"),
}
_SCALED: dict[str, Any] = {"attention_multiplier": 0.2, "residual_multiplier": 0.22}
_ATTENDING = ["full_attention"] * 3

FAMILIES = (
    Family(
        name="lfm2",
        layers=("Lfm2DecoderLayer",),
        spec=_lfm2,
        recipes=_LFM2,
        other=_lfm2_other,
        tiny=(
            tiny("Lfm2ForCausalLM", "Lfm2Config", layer_types=_ATTENDING, block_multiple_of=8),
            tiny(
                "Lfm2ForCausalLM",
                "Lfm2Config",
                label="width as given",
                layer_types=_ATTENDING,
                block_auto_adjust_ff_dim=False,
            ),
        ),
    ),
    Family(
        name="granitemoehybrid",
        layers=("GraniteMoeHybridDecoderLayer",),
        spec=_granite,
        recipes=_GRANITE,
        other=_granite_other,
        tiny=(
            tiny(
                "GraniteMoeHybridForCausalLM",
                "GraniteMoeHybridConfig",
                layer_types=["attention"] * 3,
                num_local_experts=4,
                num_experts_per_tok=2,
                shared_intermediate_size=40,
                **_SCALED,
            ),
            tiny(
                "GraniteMoeHybridForCausalLM",
                "GraniteMoeHybridConfig",
                label="no experts, rotary",
                layer_types=["attention"] * 3,
                num_local_experts=0,
                shared_intermediate_size=40,
                position_embedding_type="rope",
                **_SCALED,
            ),
        ),
    ),
    Family(
        name="bamba",
        layers=("BambaDecoderLayer",),
        spec=llama_like,
        recipes={role: recipe for role, recipe in _JAMBA.items() if "expert" not in role},
        other=_bamba_other,
        tiny=(tiny("BambaForCausalLM", "BambaConfig", attn_layer_indices=[0, 1, 2]),),
    ),
    Family(
        name="jamba",
        layers=("JambaAttentionDecoderLayer",),
        spec=_jamba,
        recipes=_JAMBA,
        tiny=(
            tiny(
                "JambaForCausalLM",
                "JambaConfig",
                attn_layer_period=1,
                attn_layer_offset=0,
                num_experts=4,
                num_experts_per_tok=2,
            ),
        ),
    ),
)
