"""Hybrids: Granite 4, Bamba, Jamba. Their layers have attention or a state space."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import LLAMA_RECIPES, field, llama_frame, llama_like, own_mixer, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.families.recurrences import SELECTIVE, STATE_SPACE, selective, state_space
from slipstream.spec import BlockSpec, FrameSpec, MoE, Norm, Role
from slipstream.weights.recipe import Stack, Take


def _granite(config: Config, index: int) -> BlockSpec:
    experts, kinds = config.num_local_experts, field(config, "layer_types", "layers_block_type")
    attends = kinds[index] in ("attention", "full_attention")
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
        rope=rope(config) if attends and config.position_embedding_type == "rope" else None,
        mixer=None if attends else _STATE,
        recurrence=None if attends else state_space(config),
        ffn=config.intermediate_size if experts else config.shared_intermediate_size,
        moe=moe if experts else None,
    )


def _bamba(config: Config, index: int) -> BlockSpec:
    if index in config.attn_layer_indices:
        return llama_like(config, index)
    return llama_like(config, index, mixer=_STATE, recurrence=state_space(config), rope=None)


def _granite_frame(config: Config) -> FrameSpec:
    return llama_frame(
        config,
        embed_scale=float(config.embedding_multiplier),
        logit_scale=1.0 / config.logits_scaling,
        rotary="model.rotary_emb" if config.position_embedding_type == "rope" else None,
    )


def _bamba_frame(config: Config) -> FrameSpec:
    return llama_frame(config, final_norm="model.final_layernorm")


def _jamba(config: Config, index: int) -> BlockSpec:
    counts = config.layers_num_experts
    experts = counts[index] if counts else 1
    moe = MoE(experts, config.num_experts_per_tok) if experts > 1 else None
    return llama_like(config, index, rope=None, moe=moe)


def _jamba_state(config: Config, index: int) -> BlockSpec:
    plain = config.hidden_act == "silu" and not config.mamba_proj_bias
    space = selective(
        channels=config.mamba_expand * config.hidden_size,
        keys=config.mamba_d_state,
        rank=config.mamba_dt_rank,
        width=config.mamba_d_conv,
        norm=Norm("rms", config.rms_norm_eps),
    )
    return replace(_jamba(config, index), mixer=_STATE, recurrence=space if plain else None)


def _jamba_frame(config: Config) -> FrameSpec:
    return llama_frame(config, final_norm="model.final_layernorm", rotary=None)


_STATE = "a state space"
_MAMBA = {_STATE: own_mixer("mamba", recurrent=STATE_SPACE)}
_NORMED = replace(
    SELECTIVE,
    step_norm="dt_layernorm.weight",
    key_norm="b_layernorm.weight",
    query_norm="c_layernorm.weight",
)
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
_SSM: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}

FAMILIES = (
    Family(
        name="granitemoehybrid",
        layers=("GraniteMoeHybridDecoderLayer",),
        spec=_granite,
        recipes=_GRANITE,
        mixers=_MAMBA,
        frame=_granite_frame,
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
                label="state spaces",
                layer_types=["mamba", "attention", "mamba"],
                num_local_experts=4,
                num_experts_per_tok=2,
                shared_intermediate_size=40,
                **_SSM,
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
        spec=_bamba,
        recipes={role: recipe for role, recipe in _JAMBA.items() if "expert" not in role},
        mixers=_MAMBA,
        frame=_bamba_frame,
        tiny=(
            tiny("BambaForCausalLM", "BambaConfig", attn_layer_indices=[0, 1, 2]),
            tiny("BambaForCausalLM", "BambaConfig", label="state spaces", attn_layer_indices=[1], **_SSM),
        ),
    ),
    Family(
        name="jamba",
        layers=("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
        spec=_jamba,
        specs={"JambaMambaDecoderLayer": _jamba_state},
        mixers={_STATE: own_mixer("mamba", recurrent=_NORMED)},
        recipes=_JAMBA,
        frame=_jamba_frame,
        tiny=(
            tiny(
                "JambaForCausalLM",
                "JambaConfig",
                attn_layer_period=1,
                attn_layer_offset=0,
                num_experts=4,
                num_experts_per_tok=2,
            ),
            tiny(
                "JambaForCausalLM",
                "JambaConfig",
                label="state spaces",
                attn_layer_period=2,
                attn_layer_offset=1,
                num_experts=4,
                num_experts_per_tok=2,
                mamba_d_state=8,
                mamba_dt_rank=8,
            ),
        ),
    ),
)
