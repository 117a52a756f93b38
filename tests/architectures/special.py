"""Exceptions of single types to the rules of `tiny.py`, and types that cannot be built here, with reasons.

The keys of `SPECIAL` are types, or `TYPE/KIND`; the fields are dotted names of config fields. Entries of
types that the installed transformers lacks are not used. The values under "" are passed to the config's
constructor, before anything is shrunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEAD = {"head_dim": 16}  # the default is None, which the attention cannot use

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_TOKENIZER = {"num_filters": 2, "depths": [1] * 7}  # the width doubles at every stage
_INDEXER = {  # None by default
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 2,
}
_GEMMA4 = {
    "num_kv_shared_layers": 0,  # shared layers are counted from the end of the stack, which was shortened
}

_WINDOWS = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}

_STAGES = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}  # a segmentation head reads four stages
_NECK = {
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [16, 16, 32, 32],
    "fusion_hidden_size": 32,
}

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "beit/segment": _STAGES,
    "data2vec-vision/segment": _STAGES,
    "dpt/segment": _NECK,
    "dpt/depth": _NECK,
    "donut-swin": _WINDOWS,
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "t5/sequence": {"decoder_start_token_id": 0},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12},
    "siglip": {"text_config.projection_size": 64},
    "siglip2": {"text_config.projection_size": 64},
    "wav2vec2-bert/ctc": {"vocab_size": 128},  # None by default
    "wav2vec2-conformer/ctc": {"vocab_size": 128},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },  # empty by default
    "dbrx": {  # its nested configs cannot be loaded from what they save
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "blt": {"num_hidden_layers": 2},  # its cache needs this field, which the default lacks
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},  # None by default
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "mobilebert": {"intra_bottleneck_size": 64},  # as wide as the other layers
    "recurrent_gemma": {"num_hidden_layers": 3},  # every third layer has attention
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},  # None by default
    "dots3_note": {
        "text_config.per_layer_config": {},
        "text_config.head_dim": 32,
    },  # by default, sliding layers override the head sizes, which shrinking makes inconsistent
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 32},
    "encoder-decoder": {
        "": {
            "encoder": {"model_type": "bert"},
            "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        }
    },
    "esmc": {"num_key_value_heads": 4},  # as many as queries
    "esm": {"vocab_size": 128, "mask_token_id": 90, "pad_token_id": 1},  # None by default
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},  # heads times their width are the state's width
    "gemma3n_text": _GEMMA4,
    "gemma4": {f"text_config.{name}": value for name, value in _GEMMA4.items()},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {f"text_config.{name}": value for name, value in _GEMMA4.items()},
    "gemma4_unified_text": _GEMMA4,
    "hrm_text": {"num_hidden_layers": 16},  # two layers in each of two stacks, times the number of cycles
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "lfm2": {  # once shrunk, all layers have attention by default
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},  # None by default
    "mamba2": {"num_heads": 8},  # heads times their width are twice the hidden size
    "ministral": _HEAD,
    "nemotron": {**_HEAD, "num_key_value_heads": 2},  # None by default
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "reformer": {  # the length must be divisible by its chunks and axial positions
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [8, 8],
        "attn_layers": ["local", "lsh"],
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "reformer/masked": {"is_decoder": False},
    "vibevoice_asr": {
        f"{kind}_tokenizer_encoder_config.{name}": value
        for kind in ("acoustic", "semantic")
        for name, value in _TOKENIZER.items()
    },
    "xlstm": {"qk_dim_factor": 1.0},  # its cache requires keys as wide as values
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,  # twice the hidden size
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
}

_AUDIO_CODES = "its decoder reads codebooks of audio, and cannot be built from its mapping's config"
_ASSISTANT = "a draft model that runs on the cache of the model it drafts for, not on tokens"

NOT_BUILT: Mapping[str, str] = {
    "align": "its batch norms, random, answer with infinities",
    "fun_asr_nano": "its adaptor's width is a quarter of the text's, which no rule by name says",
    "lw_detr": "its picture must be divisible by windows of patches",
    "gemma3n": "needs the packages timm and pillow for its vision tower",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "musicgen": _AUDIO_CODES,
    "musicgen_melody": _AUDIO_CODES,
}
"""Types that cannot be built tiny here."""

NOT_RUN: Mapping[str, str] = {
    "voxtral_realtime": "hears audio with every token",
}
"""Types whose model can be built, but not run on token ids."""
