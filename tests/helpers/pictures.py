"""Tiny vision-language models, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PICTURE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def grown(config: Any, model: str) -> Any:
    """Make a random model whose weights are large enough for errors to be visible."""
    torch.manual_seed(0)
    made = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return made


def idefics(**more: Any) -> Any:
    """Make a language model that cross-attends to images between its layers."""
    config = transformers.IdeficsConfig(
        **TEXT,
        additional_vocab_size=0,
        alpha_initializer="ones",
        vision_config={**PICTURE, "embed_dim": 32},
        perceiver_config={"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2},
        **more,
    )
    return grown(config, "IdeficsForVisionText2Text")


def idefics_asked() -> dict[str, Tensor]:
    """Return inputs of two rows, one padded, with two images each, not all visible to every token."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 100, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    seen = torch.ones(2, 9, 2, dtype=torch.long)
    seen[:, :5, 1] = seen[1, :3] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 2, 3, 32, 32, generator=generator),
        "image_attention_mask": seen,
    }


LANGUAGE: dict[str, Any] = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
_PATCHED = 16
"""Number of tokens of an image: four by four patches."""


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(**PICTURE)
    text = transformers.LlamaConfig(**LANGUAGE)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=100)


def _paligemma() -> Any:
    vision = transformers.SiglipVisionConfig(**PICTURE, projection_dim=64, vision_use_head=False)
    text = transformers.GemmaConfig(**LANGUAGE)
    return transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=100, projection_dim=64, hidden_size=64
    )


def _gemma3() -> Any:
    vision = transformers.SiglipVisionConfig(**PICTURE, vision_use_head=False)
    text = transformers.Gemma3TextConfig(**LANGUAGE, sliding_window=6, sliding_window_pattern=2)
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=_PATCHED,
        image_token_index=100,
        boi_token_index=101,
        eoi_token_index=102,
    )


def _gemma4() -> Any:
    sizes = {name: PICTURE[name] for name in PICTURE if name != "image_size"}
    heads = {"num_key_value_heads": 4, "head_dim": 16}
    sizes["patch_size"] = 4
    vision = transformers.Gemma4VisionConfig(
        **sizes, **heads, pooling_kernel_size=2, position_embedding_size=8
    )
    text = transformers.Gemma4TextConfig(
        **{**LANGUAGE, "num_hidden_layers": 4},
        global_head_dim=32,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_bidirectional_attention="vision",
    )
    return transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=100,
        boi_token_id=101,
        eoi_token_id=102,
        video_token_id=103,
        audio_token_id=104,
        boa_token_id=105,
        eoa_token_index=106,
    )


def _idefics3() -> Any:
    vision = transformers.Idefics3VisionConfig(**PICTURE)
    text = transformers.LlamaConfig(**LANGUAGE)
    return transformers.Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=100, scale_factor=1, pad_token_id=0
    )


def _lfm2_vl() -> Any:
    sizes = {name: PICTURE[name] for name in PICTURE if name != "image_size"}
    vision = transformers.Siglip2VisionConfig(**sizes, num_patches=_PATCHED)
    text = transformers.Lfm2Config(**LANGUAGE, layer_types=["conv", "full_attention"], block_multiple_of=8)
    return transformers.Lfm2VlConfig(
        text_config=text, vision_config=vision, image_token_id=100, downsample_factor=1
    )


def _smolvlm() -> Any:
    vision = transformers.SmolVLMVisionConfig(**PICTURE)
    text = transformers.LlamaConfig(**LANGUAGE)
    return transformers.SmolVLMConfig(
        vision_config=vision, text_config=text, image_token_id=100, scale_factor=1, pad_token_id=0
    )


SPEAKING = {
    "Llava": _llava,
    "PaliGemma": _paligemma,
    "Gemma3": _gemma3,
    "Gemma4": _gemma4,
    "Idefics3": _idefics3,
    "Lfm2Vl": _lfm2_vl,
    "SmolVLM": _smolvlm,
}


def speaking(prefix: str) -> Any:
    """Make a model of `SPEAKING`."""
    return grown(SPEAKING[prefix](), f"{prefix}ForConditionalGeneration")


def speaking_asked(prefix: str) -> dict[str, Tensor]:
    """Return inputs of two prompts with an image each, the first of them padded."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (2, _PATCHED + 8), generator=generator)
    ids[:, 4 : 4 + _PATCHED] = 100
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
    if prefix in ("Idefics3", "SmolVLM"):
        given["pixel_values"] = pixels[:, None]
    if prefix == "Gemma4":
        given["pixel_values"] = pixels.flatten(1).view(2, 4 * _PATCHED, 3 * 4 * 4)
        places = torch.arange(4 * _PATCHED)
        given["image_position_ids"] = torch.stack((places % 8, places // 8), dim=-1).expand(2, -1, -1)
        given["mm_token_type_ids"] = (ids == 100).long()
    if prefix == "Lfm2Vl":
        given["pixel_values"] = pixels.flatten(1).view(2, _PATCHED, 3 * 8 * 8)
        given["pixel_attention_mask"] = torch.ones(2, _PATCHED, dtype=torch.int)
        given["spatial_shapes"] = torch.tensor([[4, 4]] * 2)
    if prefix in ("Gemma3", "PaliGemma"):
        given["token_type_ids"] = (ids == 100).long()
    return given


QWEN_TEXT: dict[str, Any] = {
    **LANGUAGE,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
QWEN: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
    "Qwen2_5_VL": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
QWEN["Qwen3VLMoe"] = QWEN["Qwen3VL"]
QWEN["Qwen3_5"] = {**QWEN["Qwen3VL"], "deepstack_visual_indexes": []}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "rope_parameters": {**QWEN_TEXT["rope_parameters"], "partial_rotary_factor": 1.0},
}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def qwen(prefix: str) -> Any:
    """Make a model whose positions have three dims: time, height and width."""
    vision = {**QWEN[prefix], "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tokens = {"image_token_id": 100, "vision_start_token_id": 101, "vision_end_token_id": 102}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=QWEN_TEXT
        | (_QWEN_EXPERTS if prefix.endswith("Moe") else {})
        | (_HYBRID if prefix == "Qwen3_5" else {}),
        vision_config=vision,
        video_token_id=103,
        **tokens,
    )
    return grown(config, f"{prefix}ForConditionalGeneration")


def qwen_asked(rows: int = 1) -> dict[str, Tensor]:
    """Return inputs of prompts with an image each, all but the first of them padded."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (rows, 14), generator=generator)
    mask = torch.ones_like(ids)
    ids[:, 3], ids[:, 4:8], ids[:, 8] = 101, 100, 102
    for row in range(1, rows):
        ids[row, :row], mask[row, :row] = 0, 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(16 * rows, 3 * 2 * 8 * 8, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "mm_token_type_ids": (ids == 100).int(),
    }
