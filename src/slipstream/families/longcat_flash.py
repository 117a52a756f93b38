"""LongCat-Flash: two latent attentions and two feed-forwards per layer, and experts parallel to half of it.

Source: Meituan LongCat 2025 (arXiv 2509.01322), section 2, for the shortcut, the identity experts, and the
factors of queries and latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.families.common import field, tiny
from slipstream.families.deepseek import TINY_RANKS, latent_like
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.spec import SECOND, BlockSpec, MoE, Role, Rope
from slipstream.weights.recipe import Recipe, Stack, Take

_SHORTCUT = "experts beside half of the layer"


def _spec(config: Config, index: int) -> BlockSpec:
    moe = MoE(
        config.n_routed_experts,
        config.moe_topk,
        factor=float(config.routed_scaling_factor),
        exact=True,
        shared=config.ffn_hidden_size,
        idle=config.zero_expert_num or 0,
    )
    spec = latent_like(
        config,
        index,
        rope=Rope(config.qk_rope_head_dim),
        interleaved=True,
        ffn=config.expert_ffn_hidden_size,
        moe=moe,
        twice=True,
        course=_SHORTCUT,
    )
    if spec.latent is None:
        raise AssertionError("latent attention has latents")
    queries, keys = ((config.hidden_size / rank) ** 0.5 for rank in (config.q_lora_rank, config.kv_lora_rank))
    return replace(spec, latent=replace(spec.latent, query_scale=queries, latent_scale=keys))


def _refuse(config: Config) -> str | None:
    if field(config, "router_bias"):
        return "router_bias is True, but the original ignores the bias"
    if not config.n_routed_experts:
        return "none of its experts has weights"
    return None


def _experts(heads: Branches, x: Tensor) -> Tensor:
    """Run the experts on `(B, S, C)`; the last ones are the identity, and have no weights."""
    rows = x.flatten(0, -2)
    weights, chosen = heads.choose(rows)
    idle = chosen >= (heads.spec.moe.experts if heads.spec.moe else 0)
    mixed = heads.mix(rows, (weights, chosen.masked_fill(idle, -1)))
    identity = rows * weights.masked_fill(~idle, 0.0).sum(-1, keepdim=True)
    return (mixed + identity.to(x.dtype)).view(x.shape)


def _pass_by(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    first, second = heads.halves()
    x = x + first.attend(first.norm(Role.ATTN_NORM, x))
    normed = first.norm(Role.MLP_NORM, x)
    beside = _experts(heads, normed)
    x = x + first.feed(normed)
    x = x + second.attend(second.norm(Role.ATTN_NORM, x))
    return x + second.feed(second.norm(Role.MLP_NORM, x)) + beside


def _half(number: int) -> dict[Role, Recipe]:
    """Return the recipes of one half, under the roles of a layer that has each branch once."""
    attention = f"self_attn.{number}"
    return {
        Role.ATTN_NORM: Take(f"input_layernorm.{number}"),
        Role.Q_DOWN: Take(f"{attention}.q_a_proj"),
        Role.Q_DOWN_NORM: Take(f"{attention}.q_a_layernorm"),
        Role.Q_UP: Take(f"{attention}.q_b_proj"),
        Role.KV_DOWN: Take(f"{attention}.kv_a_proj_with_mqa"),
        Role.KV_DOWN_NORM: Take(f"{attention}.kv_a_layernorm"),
        Role.KV_UP: Take(f"{attention}.kv_b_proj"),
        Role.ATTN_OUT: Take(f"{attention}.o_proj"),
        Role.MLP_NORM: Take(f"post_attention_layernorm.{number}"),
        Role.MLP_IN: Stack((f"mlps.{number}.gate_proj", f"mlps.{number}.up_proj")),
        Role.MLP_OUT: Take(f"mlps.{number}.down_proj"),
    }


def _recipes() -> dict[Role, Recipe]:
    first, second = _half(0), _half(1)
    return {
        **first,
        Role.SHARED_IN: first[Role.MLP_IN],
        Role.SHARED_OUT: first[Role.MLP_OUT],
        Role.ROUTER: Take("mlp.router.classifier"),
        Role.ROUTER_BIAS: Take("mlp.router.e_score_correction_bias"),
        Role.EXPERTS_IN: Take("mlp.experts.gate_up_proj"),
        Role.EXPERTS_OUT: Take("mlp.experts.down_proj"),
        **{SECOND[role]: recipe for role, recipe in second.items()},
    }


_TINY: dict[str, Any] = {
    **TINY_RANKS,
    "num_layers": 2,
    "num_hidden_layers": 4,
    "ffn_hidden_size": 96,
    "head_dim": 8,
    "n_routed_experts": 6,
    "moe_topk": 3,
    "expert_ffn_hidden_size": 48,
    "routed_scaling_factor": 1.5,
}
_BUILT = "LongcatFlashForCausalLM", "LongcatFlashConfig"

FAMILY = Family(
    name="longcat_flash",
    layers=("LongcatFlashDecoderLayer",),
    spec=_spec,
    recipes=_recipes(),
    courses={_SHORTCUT: OwnCourse(_pass_by)},
    refuse=_refuse,
    tiny=(
        tiny(*_BUILT, zero_expert_num=3, **_TINY),
        tiny(*_BUILT, label="none idle, biases", zero_expert_num=0, attention_bias=True, **_TINY),
    ),
)
