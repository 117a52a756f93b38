"""JetMoE: experts followed by a bias, and attention whose queries come from experts of its own.

Source: Shen et al. 2024 (arXiv 2404.07413), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.families.common import LLAMA_RECIPES, llama_like, tiny
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.spec import BlockSpec, MoE, Norm, Role
from slipstream.weights.recipe import Take

_MIXED = "attention whose queries come from experts"
_PARTS = ("self_attention", "mlp.bias")


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(
        config,
        index,
        norm=Norm("rms", 1e-6),
        activation=config.activation_function,
        rope=None,
        branches="feed_forward",
        moe=MoE(config.num_local_experts, config.num_experts_per_tok, "topk_softmax"),
        course=_MIXED,
    )


def _hear(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    passed = {name: value for name, value in given.items() if name != "hidden_states"}
    attended, *_ = layer.self_attention(hidden_states=heads.norm(Role.ATTN_NORM, x), **passed)
    x = x + attended
    fed: Tensor = heads.feed(heads.norm(Role.MLP_NORM, x)) + layer.mlp.bias
    return x + fed


FAMILY = Family(
    name="jetmoe",
    layers=("JetMoeDecoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: LLAMA_RECIPES[Role.ATTN_NORM],
        Role.MLP_NORM: LLAMA_RECIPES[Role.MLP_NORM],
        Role.ROUTER: Take("mlp.router.layer"),
        Role.EXPERTS_IN: Take("mlp.input_linear"),
        Role.EXPERTS_OUT: Take("mlp.output_linear"),
    },
    courses={_MIXED: OwnCourse(_hear, _PARTS, note=_MIXED)},
    tiny=(tiny("JetMoeForCausalLM", "JetMoeConfig", kv_channels=16, num_local_experts=4),),
)
