"""Nemotron-H and Nemotron 3: a layer is one branch, a state space, attention, a feed-forward or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.families.common import llama_like, tiny
from slipstream.families.experts import corrected_moe
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take

_STATE, _BEHIND, _HEARS, _FEEDS = "a state space", "experts behind a projection", "attention", "feed-forward"


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
        return replace(spec, branches="attention", course=_HEARS)
    if kind == "mlp":
        return replace(spec, branches="feed_forward", course=_FEEDS)
    if kind != "moe":
        return replace(spec, branches="neither", course=_STATE)
    if config.moe_latent_size is not None:
        return replace(spec, branches="neither", course=_BEHIND)
    moe = corrected_moe(config, shared=config.moe_shared_expert_intermediate_size)
    ffn = config.moe_intermediate_size
    return replace(spec, branches="feed_forward", course=_FEEDS, ffn=ffn, moe=moe)


def _hear(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    return x + heads.attend(heads.norm(Role.ATTN_NORM, x))


def _fed(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    return x + heads.feed(heads.norm(Role.ATTN_NORM, x))


def _keep(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    passed = {"cache_params": given.get("past_key_values"), "attention_mask": given.get("attention_mask")}
    kept: Tensor = layer.mixer(heads.norm(Role.ATTN_NORM, x), **passed)
    return x + kept


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
    courses={
        _STATE: OwnCourse(_keep, ("mixer",), note=_STATE),
        _BEHIND: OwnCourse(_ask, ("mixer",), note=f"a mixture of {_BEHIND}"),
        _HEARS: OwnCourse(_hear),
        _FEEDS: OwnCourse(_fed),
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
