"""Nemotron-H and Nemotron 3: a layer is one branch, a state space, attention, a feed-forward or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.families.common import llama_frame, llama_like, own_mixer, tiny
from slipstream.families.experts import corrected_moe
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.families.recurrences import STATE_SPACE, mamba_2
from slipstream.spec import BlockSpec, FrameSpec, Norm, Recurrence, Role
from slipstream.weights.recipe import Stack, Take

_STATE, _BEHIND = "a state space", "experts behind a projection"


def _spec(config: Config, index: int) -> BlockSpec:
    spec = llama_like(
        config,
        index,
        norm=Norm("rms", config.layer_norm_epsilon),
        activation=config.mlp_hidden_act,
        gated=False,
        rope=None,
    )
    kind = config.layers_block_type[index]
    if kind in ("full_attention", "attention"):
        return replace(spec, branches="attention")
    if kind == "mlp":
        return replace(spec, branches="feed_forward")
    if kind != "moe":
        return replace(spec, branches="attention", mixer=_STATE, recurrence=_space(config))
    if config.moe_latent_size is not None:
        return replace(spec, branches="neither", course=_BEHIND)
    moe = corrected_moe(config, shared=config.moe_shared_expert_intermediate_size)
    return replace(spec, branches="feed_forward", ffn=config.moe_intermediate_size, moe=moe)


def _space(config: Config) -> Recurrence | None:
    if config.mamba_hidden_act != "silu" or config.use_bias:
        return None
    space = mamba_2(
        heads=config.mamba_num_heads,
        groups=config.n_groups,
        values=config.mamba_head_dim,
        keys=config.ssm_state_size,
        width=config.conv_kernel,
        eps=config.layer_norm_epsilon,
    )
    return replace(space, least_step=float(config.time_step_min))


def _frame(config: Config) -> FrameSpec:
    norm = Norm("rms", config.layer_norm_epsilon)
    return llama_frame(config, norm=norm, embed="model.embeddings", final_norm="model.norm_f", rotary=None)


def _ask(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    mixed: Tensor = layer.mixer(heads.norm(Role.ATTN_NORM, x))
    return x + mixed


_TINY: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
}
_BUILT = "NemotronHForCausalLM", "NemotronHConfig"

FAMILY = Family(
    name="nemotron_h",
    layers=("NemotronHBlock",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("norm"),
        Role.QKV: Stack(("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")),
        Role.ATTN_OUT: Take("mixer.o_proj"),
        Role.MLP_IN: Take("mixer.up_proj"),
        Role.MLP_OUT: Take("mixer.down_proj"),
        Role.ROUTER: Take("mixer.gate"),
        Role.ROUTER_BIAS: Take("mixer.gate.e_score_correction_bias"),
        Role.EXPERTS_IN: Take("mixer.experts.up_proj"),
        Role.EXPERTS_OUT: Take("mixer.experts.down_proj"),
        Role.SHARED_IN: Take("mixer.shared_experts.up_proj"),
        Role.SHARED_OUT: Take("mixer.shared_experts.down_proj"),
    },
    mixers={_STATE: own_mixer("mixer", recurrent=STATE_SPACE)},
    frame=_frame,
    courses={
        _BEHIND: OwnCourse(_ask, ("mixer",), note=f"a mixture of {_BEHIND}"),
    },
    tiny=(
        tiny(*_BUILT, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], **_TINY),
        tiny(
            *_BUILT,
            label="groups, experts behind a projection",
            layers_block_type=["full_attention", "moe"],
            moe_latent_size=16,
            mlp_bias=True,
            **_TINY,
        ),
        tiny(
            *_BUILT,
            label="groups, scaled",
            layers_block_type=["moe", "full_attention"],
            n_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=False,
            **_TINY,
        ),
    ),
)
