"""HRM-Text: gated attention, norms without weights, and stacks that run alternately over one cache."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Gate, Role
from slipstream.weights.recipe import Stack, Unit


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, kv_heads=config.num_attention_heads, gate=Gate())


FAMILY = Family(
    name="hrm_text",
    layers=("HrmTextDecoderLayer",),
    spec=_spec,
    recipes={
        **LLAMA_RECIPES,
        Role.ATTN_NORM: Unit(),
        Role.QKV: Stack(tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "gate"))),
        Role.MLP_NORM: Unit(),
    },
    tiny=(
        tiny(
            "HrmTextForCausalLM",
            "HrmTextConfig",
            num_hidden_layers=12,
            num_layers_per_stack=2,
            H_cycles=2,
            L_cycles=2,
        ),
    ),
)
