"""Aria's language model: llama's attention, experts stored `(in, out)`, and shared experts."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import MOE_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.experts import SHARED
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Role
from slipstream.weights.recipe import First, Take


def _spec(config: Config, index: int) -> BlockSpec:
    moe = MoE(
        config.moe_num_experts,
        config.moe_topk,
        scoring="topk_softmax",
        shared=config.intermediate_size * config.moe_num_shared_experts,
    )
    return llama_like(config, index, moe=moe)


def _either(*names: str) -> First:
    """Return the recipe of the experts by their present name or an earlier one."""
    return First(tuple(Take(f"mlp.experts.{name}", transposed=True) for name in names))


def _refuse(config: Config) -> str | None:
    # Only the shared experts follow `hidden_act`; the others always use silu.
    return None if config.hidden_act == "silu" else f"hidden_act is {config.hidden_act!r}, not silu"


_TINY: dict[str, Any] = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2}

FAMILY = Family(
    name="aria_text",
    layers=("AriaTextDecoderLayer",),
    spec=_spec,
    recipes={
        **MOE_RECIPES,
        **SHARED,
        Role.ROUTER: Take("mlp.router"),
        Role.EXPERTS_IN: _either("gate_up_proj", "fc1"),
        Role.EXPERTS_OUT: _either("down_proj", "fc2"),
    },
    frame=llama_frame,
    refuse=_refuse,
    tiny=(tiny("AriaTextForCausalLM", "AriaTextConfig", **_TINY),),
)
