"""MLCD: CLIP's vision layer with rotary heads."""

from __future__ import annotations

from slipstream.families.family import Config, Family
from slipstream.families.towers import CLIP_RECIPES, clip_like, picture_tiny
from slipstream.spec import BlockSpec, Rope


def _spec(config: Config, index: int) -> BlockSpec:
    return clip_like(config, index, rope=Rope(config.hidden_size // config.num_attention_heads))


FAMILY = Family(
    name="mlcd_vision_model",
    layers=("MLCDEncoderLayer",),
    spec=_spec,
    recipes=CLIP_RECIPES,
    tiny=(picture_tiny("MLCDVisionModel", "MLCDVisionConfig"),),
)
