"""BEiT and Data2Vec's vision: ViT's layer, scaled per channel, with a learned bias by relative position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.families.family import Config, Family, OwnBias
from slipstream.families.towers import VIT_RECIPES, clip_like, picture_tiny, vit_like
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Take

_RECIPES = {**VIT_RECIPES, Role.ATTN_SCALE: Take("lambda_1"), Role.MLP_SCALE: Take("lambda_2")}
_READS = frozenset({"resolution", "interpolate_pos_encoding", "relative_position_bias"})


def _own_bias(layer: Any, given: Mapping[str, Any], own: Any, patch: int) -> Any:
    """Return the layer's own bias, for the image's size, plus the one that the model passes, if any."""
    shared = given.get("relative_position_bias")
    if own is None:
        return shared
    window = tuple(int(side) // patch for side in given["resolution"])
    tokens = given["hidden_states"].shape[1]
    made = own(window, bool(given.get("interpolate_pos_encoding", False)), dim_size=tokens)
    return made if shared is None else made + shared


def _of_beit(layer: Any, given: Mapping[str, Any]) -> Any:
    return _own_bias(layer, given, layer.relative_position_bias, layer.patch_size)


def _of_data2vec(layer: Any, given: Mapping[str, Any]) -> Any:
    attention = layer.attention.attention
    own = getattr(attention, "relative_position_bias", None)
    return _own_bias(layer, given, own, attention.config.patch_size)


def _family(
    name: str,
    prefix: str,
    spec: Callable[[Config, int], BlockSpec],
    make: Callable[[Any, Mapping[str, Any]], Any],
) -> Family:
    def small(label: str = "", **options: Any) -> Any:
        return picture_tiny(f"{prefix}Model", f"{prefix}Config", label=label, **options)

    return Family(
        name=name,
        layers=(f"{prefix}Layer",),
        spec=spec,
        recipes=_RECIPES,
        ignored=("*relative_position_bias_table",),
        bias=OwnBias(make, _READS),
        tiny=(
            small(),
            small("own bias", use_relative_position_bias=True),
            small(
                "shared bias, no scale", use_shared_relative_position_bias=True, layer_scale_init_value=0.0
            ),
        ),
    )


FAMILIES = (
    _family("beit", "Beit", vit_like, _of_beit),
    _family("data2vec-vision", "Data2VecVision", clip_like, _of_data2vec),
)
