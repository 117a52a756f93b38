"""NLLB-MoE: M2M100's layers, some of them with experts of limited capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.families.bart import BART_RECIPES, BART_TINY, bart_decoder, bart_encoder, bart_frame
from slipstream.families.family import Config, Family, OwnMixer, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Role
from slipstream.weights.recipe import Stack, Take

_LIMITED = "a mixture of experts with limited capacity"


def _measure(layer: Any, config: Config) -> BlockSpec:
    cross_attends = hasattr(layer, "cross_attention")
    spec = bart_decoder(config, "pre") if cross_attends else bart_encoder(config, "pre")
    return replace(spec, clamp="end", feeder=_LIMITED if layer.is_sparse else None)


def _first(config: Config, index: int) -> BlockSpec:
    raise AssertionError("these layers are measured")


def _feed(experts: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    # The router ignores padding, which it reads from the mask of the layer's self-attention.
    out: Tensor = experts(x, given.get("attention_mask"))
    return out


def _refuse(config: Config) -> str | None:
    if config.second_expert_policy != "all":
        return f"second_expert_policy is {config.second_expert_policy!r}: experts are drawn at random"
    return None


def _frame(config: Config) -> FrameSpec | None:
    return bart_frame(config, "pre", pos_padding=True, logit_bias=None)


def _tiny(label: str = "", **options: Any) -> Tiny:
    sparse = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    own = {**BART_TINY, **sparse, **options}
    return Tiny("NllbMoeForConditionalGeneration", "NllbMoeConfig", own, label)


FAMILY = Family(
    name="nllb-moe",
    layers=("NllbMoeEncoderLayer", "NllbMoeDecoderLayer"),
    spec=_first,
    measure=_measure,
    recipes={
        **BART_RECIPES,
        Role.CROSS_NORM: Take("cross_attention_layer_norm"),
        Role.CROSS_Q: Take("cross_attention.q_proj"),
        Role.CROSS_KV: Stack(("cross_attention.k_proj", "cross_attention.v_proj")),
        Role.CROSS_OUT: Take("cross_attention.out_proj"),
        Role.MLP_NORM: Take("ff_layer_norm"),
        Role.MLP_IN: Take("ffn.fc1"),
        Role.MLP_OUT: Take("ffn.fc2"),
    },
    frame=_frame,
    refuse=_refuse,
    feeders={_LIMITED: OwnMixer("ffn", _feed)},
    tiny=(
        _tiny(),
        _tiny(
            "tokens that no expert takes",
            moe_eval_capacity_token_fraction=0.2,
            batch_prioritized_routing=True,
            normalize_router_prob_before_dropping=True,
            router_bias=True,
            decoder_sparse_step=1,
        ),
    ),
)
