"""CLIP, SigLIP and the towers that share their layer; only CLIP's own text is causal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.families.common import bert_tiny
from slipstream.families.family import Config, Family, Tiny
from slipstream.families.towers import CLIP_RECIPES, clip_like, is_text, picture_tiny
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Recipe, Take


def _causal_text(config: Config, index: int) -> BlockSpec:
    return clip_like(config, index, causal=is_text(config))


def _family(
    name: str,
    layers: tuple[str, ...],
    *tiny: Tiny,
    spec: Callable[[Config, int], BlockSpec] = clip_like,
    recipes: Mapping[Role, Recipe] = CLIP_RECIPES,
) -> Family:
    return Family(name=name, layers=layers, spec=spec, recipes=recipes, tiny=tiny)


def _seeing(prefix: str, **options: Any) -> Tiny:
    return picture_tiny(f"{prefix}VisionModel", f"{prefix}VisionConfig", **options)


def _reading(prefix: str, **options: Any) -> Tiny:
    return bert_tiny(f"{prefix}TextModel", f"{prefix}TextConfig", label="text", **options)


_FUSED = {**CLIP_RECIPES, Role.QKV: Take("self_attn.qkv"), Role.ATTN_OUT: Take("self_attn.projection")}
_PATCHES: dict[str, Any] = {"num_patches": 16}

FAMILIES = (
    _family(
        "clip",
        ("CLIPEncoderLayer", "Kosmos2VisionEncoderLayer", "IdeficsVisionEncoderLayer"),
        _seeing("CLIP"),
        _reading("CLIP"),
        spec=_causal_text,
    ),
    _family(
        "metaclip_2",
        ("MetaClip2EncoderLayer",),
        _seeing("MetaClip2"),
        _reading("MetaClip2"),
        spec=_causal_text,
    ),
    _family("clipseg", ("CLIPSegEncoderLayer",), _seeing("CLIPSeg"), _reading("CLIPSeg"), spec=_causal_text),
    _family("owlvit", ("OwlViTEncoderLayer",), _seeing("OwlViT"), _reading("OwlViT"), spec=_causal_text),
    _family("owlv2", ("Owlv2EncoderLayer",), _seeing("Owlv2"), _reading("Owlv2"), spec=_causal_text),
    _family("altclip", ("AltCLIPEncoderLayer",), _seeing("AltCLIP")),
    _family("chinese_clip", ("ChineseCLIPVisionLayer",), _seeing("ChineseCLIP")),
    _family("git", ("GitVisionEncoderLayer",), _seeing("Git")),
    _family("siglip", ("SiglipEncoderLayer",), _seeing("Siglip"), _reading("Siglip")),
    _family("tipsv2_text_model", ("Tipsv2TextEncoderLayer",), _reading("Tipsv2")),
    _family("siglip2", ("Siglip2EncoderLayer",), _seeing("Siglip2", **_PATCHES), _reading("Siglip2")),
    _family(
        "idefics3_vision",
        ("Idefics3EncoderLayer", "Idefics2EncoderLayer"),
        picture_tiny("Idefics3VisionTransformer", "Idefics3VisionConfig"),
    ),
    _family(
        "smolvlm_vision",
        ("SmolVLMEncoderLayer",),
        picture_tiny("SmolVLMVisionTransformer", "SmolVLMVisionConfig"),
    ),
    _family("blip", ("BlipEncoderLayer",), _seeing("Blip"), recipes=_FUSED),
    _family("blip-2", ("Blip2EncoderLayer",), _seeing("Blip2"), recipes=_FUSED),
    _family("instructblip", ("InstructBlipEncoderLayer",), _seeing("InstructBlip"), recipes=_FUSED),
    _family(
        "instructblipvideo",
        ("InstructBlipVideoEncoderLayer",),
        _seeing("InstructBlipVideo"),
        recipes=_FUSED,
    ),
)
