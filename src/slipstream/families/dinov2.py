"""DINOv2, DINOv3, TIPSv2: ViT's layer with a scale per channel on each branch; DINOv3 is rotary."""

from __future__ import annotations

from typing import Any

from slipstream.families.family import Config, Family
from slipstream.families.towers import picture_tiny, vit_like
from slipstream.spec import BlockSpec, Role, Rope
from slipstream.weights.recipe import First, Stack, Take

_RECIPES = {
    Role.ATTN_NORM: Take("norm1"),
    Role.QKV: First(
        (
            Stack(tuple(f"attention.{part}_proj" for part in "qkv")),
            Stack(tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))),
        )
    ),
    Role.ATTN_OUT: First((Take("attention.o_proj"), Take("attention.output.dense"))),
    Role.ATTN_SCALE: Take("layer_scale1.lambda1"),
    Role.MLP_NORM: Take("norm2"),
    Role.MLP_IN: First(
        (
            Take("mlp.fc1"),
            Take("mlp.weights_in"),
            Stack(("mlp.gate_proj", "mlp.up_proj")),
            Take("mlp.up_proj"),
        )
    ),
    Role.MLP_OUT: First((Take("mlp.fc2"), Take("mlp.weights_out"), Take("mlp.down_proj"))),
    Role.MLP_SCALE: Take("layer_scale2.lambda1"),
}


def _spec(config: Config, index: int) -> BlockSpec:
    width = int(config.hidden_size * config.mlp_ratio)
    if config.use_swiglu_ffn:
        width = (width * 2 // 3 + 7) // 8 * 8
        return vit_like(config, index, ffn=width, gated=True, activation="silu")
    return vit_like(config, index, ffn=width)


def _turned(config: Config, index: int) -> BlockSpec:
    dim = config.hidden_size // config.num_attention_heads
    return vit_like(config, index, head_dim=dim, scale=dim**-0.5, rope=Rope(dim), gated=config.use_gated_mlp)


def _family(name: str, prefix: str, **options: Any) -> Family:
    config = f"{prefix}Config"
    return Family(
        name=name,
        layers=(f"{prefix}Layer",),
        spec=_spec,
        recipes=_RECIPES,
        tiny=(
            picture_tiny(f"{prefix}Model", config, mlp_ratio=2, **options),
            picture_tiny(
                f"{prefix}Model", config, label="gated", use_swiglu_ffn=True, qkv_bias=False, **options
            ),
        ),
    )


FAMILIES = (
    _family("dinov2", "Dinov2"),
    _family("dinov2_with_registers", "Dinov2WithRegisters"),
    _family("tipsv2_vision_model", "Tipsv2Vision"),
    Family(
        name="dinov3_vit",
        layers=("DINOv3ViTLayer",),
        spec=_turned,
        recipes=_RECIPES,
        tiny=(
            picture_tiny("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2),
            picture_tiny(
                "DINOv3ViTModel",
                "DINOv3ViTConfig",
                label="gated, biases",
                use_gated_mlp=True,
                hidden_act="silu",
                key_bias=True,
                mlp_bias=False,
            ),
        ),
    ),
)
