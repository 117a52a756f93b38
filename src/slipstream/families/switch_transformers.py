"""Switch Transformers: T5's layers, some of them with experts of limited capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.families.family import Config, Family, OwnMixer, Tiny
from slipstream.families.t5 import T5_RECIPES, T5_TINY, t5_frame, t5_layer
from slipstream.spec import BlockSpec, FrameSpec, Role
from slipstream.weights.recipe import First, Take

_LIMITED = (
    "a mixture of experts with limited capacity",
    "a decoder's mixture of experts with limited capacity",
)


def _measure(layer: Any, config: Config) -> BlockSpec:
    spec = t5_layer(config, "shared", gated=False)
    return replace(spec, feeder=_LIMITED[config.is_decoder]) if layer.is_sparse else spec


def _first(config: Config, index: int) -> BlockSpec:
    raise AssertionError("these layers are measured")


def _feed(experts: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    out: Tensor = experts(x)
    return out


def _frame(config: Config) -> FrameSpec:
    return t5_frame(config, scaled=bool(config.tie_word_embeddings))


def _tiny(label: str = "", **options: Any) -> Tiny:
    sizes = {
        "num_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "num_experts": 4,
    }
    name = "SwitchTransformers"
    return Tiny(f"{name}ForConditionalGeneration", f"{name}Config", {**T5_TINY, **sizes, **options}, label)


FAMILY = Family(
    name="switch_transformers",
    layers=("SwitchTransformersBlock",),
    spec=_first,
    measure=_measure,
    recipes={
        **T5_RECIPES,
        Role.MLP_IN: First((Take("layer.2.mlp.wi"), Take("layer.1.mlp.wi"))),
        Role.MLP_OUT: First((Take("layer.2.mlp.wo"), Take("layer.1.mlp.wo"))),
    },
    frame=_frame,
    ignored=("*.relative_attention_bias.weight",),
    relative="layer.0.SelfAttention",
    feeders={name: OwnMixer(f"layer.{place}.mlp", _feed) for place, name in enumerate(_LIMITED, 1)},
    tiny=(
        _tiny(),
        _tiny("tokens that no expert takes", expert_capacity=2, num_experts=2, tie_word_embeddings=False),
    ),
)
