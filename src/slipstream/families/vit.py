"""ViT and the encoders of images, videos and audio that share its layer."""

from __future__ import annotations

from typing import Any

from slipstream.families.family import Config, Family
from slipstream.families.towers import VIT_RECIPES, clip_like, picture_tiny, vit_like
from slipstream.spec import BlockSpec


def _by_ratio(config: Config, index: int) -> BlockSpec:
    return vit_like(config, index, ffn=int(config.hidden_size * config.mlp_ratio))


def _family(
    name: str,
    prefix: str,
    *,
    model: str = "Model",
    layer: str = "Layer",
    reads_head_dim: bool = True,
    by_ratio: bool = False,
    **options: Any,
) -> Family:
    return Family(
        name=name,
        layers=(f"{prefix}{layer}",),
        spec=_by_ratio if by_ratio else vit_like if reads_head_dim else clip_like,
        recipes=VIT_RECIPES,
        tiny=(
            picture_tiny(f"{prefix}{model}", f"{prefix}Config", **options),
            picture_tiny(f"{prefix}{model}", f"{prefix}Config", label="no biases", qkv_bias=False, **options),
        ),
    )


_SOUND: dict[str, Any] = {"max_length": 48, "num_mel_bins": 24, "time_stride": 8, "frequency_stride": 8}

FAMILIES = (
    _family("vit", "ViT", model="ForImageClassification"),
    _family("deit", "DeiT"),
    _family("vit_mae", "ViTMAE", mask_ratio=0.0),
    _family("vit_msn", "ViTMSN"),
    _family("ijepa", "IJepa"),
    _family("pixio", "Pixio", by_ratio=True, mlp_ratio=2, n_cls_tokens=2),
    _family("vivit", "Vivit", num_frames=4, tubelet_size=[2, 8, 8]),
    _family("videomae", "VideoMAE", reads_head_dim=False, num_frames=4, tubelet_size=2),
    _family("yolos", "Yolos", reads_head_dim=False, image_size=[32, 32], num_detection_tokens=5),
    _family("dpt", "DPT", layer="ViTLayer", reads_head_dim=False, is_hybrid=False),
    _family("audio-spectrogram-transformer", "AST", model="ForAudioClassification", **_SOUND),
)
