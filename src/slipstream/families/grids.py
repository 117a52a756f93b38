"""Vision towers that pack images and videos into one row, each with its own grid: Qwen-VL's and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.families.family import Config, Family, Heads, OwnAttention, Tiny
from slipstream.spec import BlockSpec, Norm, Role, Rope
from slipstream.weights.recipe import First, Stack, Take

_RECIPES = {
    Role.ATTN_NORM: Take("norm1"),
    Role.QKV: First((Take("attn.qkv"), Stack(("attn.q", "attn.k", "attn.v")))),
    Role.ATTN_OUT: Take("attn.proj"),
    Role.MLP_NORM: Take("norm2"),
    Role.MLP_IN: First((Stack(("mlp.gate_proj", "mlp.up_proj")), Take("mlp.fc1"), Take("mlp.linear_fc1"))),
    Role.MLP_OUT: First((Take("mlp.down_proj"), Take("mlp.fc2"), Take("mlp.linear_fc2"))),
}


def _measure(layer: Any, config: Config) -> BlockSpec:
    """Return the spec from the layer itself: the towers' configs have different names for the same fields."""
    norm, mlp = layer.norm1, layer.mlp
    width, heads = int(norm.weight.shape[0]), int(layer.attn.num_heads)
    gated = hasattr(mlp, "gate_proj")
    last = next(getattr(mlp, name) for name in ("down_proj", "fc2", "linear_fc2") if hasattr(mlp, name))
    plain = hasattr(norm, "bias")
    return BlockSpec(
        hidden=width,
        heads=heads,
        kv_heads=int(getattr(layer.attn, "num_key_value_heads", heads)),
        head_dim=width // heads,
        ffn=int(last.weight.shape[1]),
        norm=Norm("layer", norm.eps) if plain else Norm("rms", norm.variance_epsilon),
        activation=config.hidden_act,
        gated=gated,
        scale=(width // heads) ** -0.5,
        causal=False,
        rope=Rope(width // heads),
        own_attention=True,
    )


def _attend(
    heads: Heads, layer: Any, given: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """Attend within each image, frame or window; `cu_seqlens` has their boundaries."""
    lengths = [length for length in given["cu_seqlens"].diff().tolist() if length]
    outputs: list[Tensor] = []
    start = 0
    while lengths:
        length = lengths[0]
        count = next((i for i, other in enumerate(lengths) if other != length), len(lengths))
        end = start + count * length
        alike = (t[0, start:end].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v))
        outputs.append(heads.attend(*alike).flatten(0, 1))
        lengths, start = lengths[count:], end
    return (torch.cat(outputs)[None],)


_TEXT: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
_VISION: Mapping[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
_TOKENS = {
    "image_token_id": 100,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}


def _tiny(prefix: str, label: str, vision: Mapping[str, Any], **text: Any) -> Tiny:
    options = {"text_config": {**_TEXT, **text}, "vision_config": {**_VISION, **vision}, **_TOKENS}
    return Tiny(f"{prefix}ForConditionalGeneration", f"{prefix}Config", options, label)


FAMILY = Family(
    name="grids",
    layers=(
        "Qwen2VLVisionBlock",
        "Qwen2_5_VLVisionBlock",
        "Qwen2_5OmniVisionBlock",
        "Qwen3VLVisionBlock",
        "Qwen3VLMoeVisionBlock",
        "Qwen3OmniMoeVisionBlock",
        "Qwen3_5VisionBlock",
        "Qwen3_5MoeVisionBlock",
        "Glm4vVisionBlock",
        "Glm4vMoeVisionBlock",
        "Exaone4_5_VisionBlock",
    ),
    spec=lambda config, index: _measure(None, config),
    measure=_measure,
    recipes=_RECIPES,
    attention=OwnAttention(_attend, frozenset({"cu_seqlens", "max_seqlen"}), packed=True),
    tiny=(
        _tiny("Qwen2VL", "", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
        _tiny(
            "Qwen2_5_VL",
            "windows, gated",
            {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        ),
        _tiny(
            "Exaone4_5_",
            "shared heads",
            {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "num_key_value_heads": 1,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            model_type="exaone4",
        ),
        _tiny(
            "Qwen3VL",
            "places",
            {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        ),
    ),
)
