"""AIMv2: the same pre-norm layer, with RMSNorm and a gated feed-forward, for images and text.

Text is only causal by its mask: without padding transformers passes none, and every token sees all.
"""

from __future__ import annotations

from slipstream.families.common import bert_tiny
from slipstream.families.family import Config, Family
from slipstream.families.towers import clip_like, picture_tiny
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    return clip_like(config, index, norm=Norm("rms", config.rms_norm_eps), gated=True)


FAMILY = Family(
    name="aimv2",
    layers=("Aimv2EncoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("rms_norm1"),
        Role.QKV: Stack(tuple(f"attention.{part}_proj" for part in "qkv")),
        Role.ATTN_OUT: Take("attention.out_proj"),
        Role.MLP_NORM: Take("rms_norm2"),
        Role.MLP_IN: Stack(("ffn.gate_proj", "ffn.up_proj")),
        Role.MLP_OUT: Take("ffn.down_proj"),
    },
    tiny=(
        picture_tiny("Aimv2VisionModel", "Aimv2VisionConfig", qkv_bias=True),
        bert_tiny("Aimv2TextModel", "Aimv2TextConfig", label="text", mlp_bias=True),
    ),
)
