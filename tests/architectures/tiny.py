"""Tiny random models of every type of model that transformers has, made by shrinking the default configs.

The rules are by field name, for all types at once; exceptions for single types are in `special.py`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

from tests.architectures.special import SPECIAL

Kind = Literal[
    "causal", "masked", "seq2seq", "sequence", "image", "picture", "segment", "detect", "depth", "video",
    "two towers", "sound", "ctc", "speech",
]  # fmt: skip

_MAPPINGS: Mapping[Kind, tuple[str, str]] = {
    "causal": ("CAUSAL_LM", "CausalLM"),
    "masked": ("MASKED_LM", "MaskedLM"),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", "Seq2SeqLM"),
    "sequence": ("SEQUENCE_CLASSIFICATION", "SequenceClassification"),
    "image": ("IMAGE_CLASSIFICATION", "ImageClassification"),
    "picture": ("IMAGE", ""),
    "segment": ("SEMANTIC_SEGMENTATION", "SemanticSegmentation"),
    "detect": ("OBJECT_DETECTION", "ObjectDetection"),
    "depth": ("DEPTH_ESTIMATION", "DepthEstimation"),
    "video": ("VIDEO_CLASSIFICATION", "VideoClassification"),
    "two towers": ("ZERO_SHOT_IMAGE_CLASSIFICATION", "ZeroShotImageClassification"),
    "sound": ("AUDIO_CLASSIFICATION", "AudioClassification"),
    "ctc": ("CTC", "CTC"),
    "speech": ("SPEECH_SEQ_2_SEQ", "SpeechSeq2Seq"),
}
"""By kind: the mapping of its types in transformers, and the suffix of the auto class that builds them."""

TEXT: frozenset[Kind] = frozenset({"causal", "masked", "seq2seq", "sequence"})
"""Kinds whose inputs are tokens only."""

VOCABULARY = 128

# The first pattern that matches a whole field name gives the upper bound of the field.
_BOUNDS: tuple[tuple[str, int], ...] = (
    (r"num_key_value_heads|num_kv_heads|kv_n_heads|swa_num_key_value_heads", 2),
    (r"index_n_heads|linear_num_key_heads|num_query_groups|n_mamba_heads", 2),
    (r"mamba_(n|num)_heads", 8),
    (r".*num_(\w+_)?heads|n_heads?|.*attention_heads|linear_num_heads|num_heads", 4),
    (r"rotary_dim", 8),
    (r"qk_head_dim", 32),
    (r".*head_?dim|d_kv|d_head|dim_head|kv_channels|attention_head_size|mamba_d_head", 16),
    (r"time_step_rank|mamba_dt_rank|.*(_|^)rank|hc_lowrank", 16),
    (r"(moe|.*expert).*(intermediate|ffn_hidden)_size|shared_intermediate_size", 32),
    (r".*(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|d_ff|d_inner|dff|dim_ff|feed_forward_size)", 96),
    (r"hidden_dim|mlp_dim", 96),
    (r"type_vocab_size|task_type_vocab_size", 2),
    (r".*vocab_size.*|.*hash_byte_group_vocab", VOCABULARY),
    (r"hidden_size_per_layer_input|ple_embed_dim", 16),
    (r".*hidden_size.*|d_model|n_embd|dim|.*embed_dim|emb_dim|.*embedding_size|embedding_dim", 64),
    (r"adapter_input_size|adapter_\w+_dim|\w+_output_dim|projector_input_dim", 64),
    (r"word_embed_proj_dim|lru_width|d_latents", 64),
    (r"(num_|n_|moe_num_)\w*experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k", 2),
    (r"n_group|num_expert_group|topk_group", 1),
    (r".*window(_size|_len)?", 6),
    (r"\w*state_size|mamba_d_state", 8),
    (r"\w*position_embeddings|n_positions|n_ctx|max_seq_len|max_\w+_positions|num_latents", 256),
    (r"image_size|crop_size", 32),
    (r"depth|block_multiple_of", 2),
)
_LAYERS = r"\w*_layers|n_layer|num_layers_per_stack|num_blocks"
_LAYERS_KEPT = frozenset(
    {
        "mlp_only_layers",
        "num_adapter_layers",
        "num_kv_shared_layers",
        "num_dense_layers",
        "num_feat_extract_layers",
    }
)
_STAGES = ("out_features", "out_indices", "stage_names")
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}


def model_types() -> list[tuple[str, Kind]]:
    """Return every type of model that the installed transformers has, with its kind."""
    return [
        (name, kind)
        for kind, (mapping, _) in _MAPPINGS.items()
        for name in sorted(getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"))
        if kind != "picture" or name not in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    ]


def tiny_model(model_type: str, kind: Kind) -> Any:
    """Make a random model of a type, in float32 and eval mode."""
    config = tiny_config(model_type, kind)
    torch.manual_seed(0)
    mapping, suffix = _MAPPINGS[kind]
    named = getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")[model_type]
    if isinstance(named, tuple | list):  # several classes: checkpoints name theirs in `architectures`
        config.architectures = [named[0]]
    auto_class = getattr(transformers, f"AutoModelFor{suffix}" if suffix else "AutoModel")
    model: Any = auto_class.from_config(config, dtype=torch.float32)
    # Some are left uninitialised, and zeros and ones would hide errors.
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dim():
            parameter.data = 0.3 * torch.randn_like(parameter) / max(1, parameter.shape[-1]) ** 0.25 + (
                parameter.dim() == 1 and parameter.numel() > 1
            )
    if (
        getattr(config, "is_encoder_decoder", False)
        and hasattr(model, "generation_config")
        and model.generation_config.decoder_start_token_id is None
    ):
        model.generation_config.decoder_start_token_id = 1  # set in checkpoints, but not by default
    return model.eval()


def tiny_config(model_type: str, kind: Kind) -> Any:
    """Return a type's default config, shrunk."""
    config_class = CONFIG_MAPPING[model_type]
    special = {**SPECIAL.get(model_type, {}), **SPECIAL.get(f"{model_type}/{kind}", {})}
    fields = config_class(**special.pop("", {})).to_dict()
    _shrink(fields)
    for path, value in special.items():
        place = fields
        *above, leaf = path.split(".")
        for name in above:
            place = place[name]
        place[leaf] = copy.deepcopy(value)
    return config_class.from_dict(fields)


def _shrink(fields: dict[str, Any]) -> None:
    """Shrink a config's dictionary and the nested ones, in place."""
    for name in ("transformers_version", "architectures", "id2label", "label2id", "dtype", *_STAGES):
        fields.pop(name, None)
    total = next((fields[name] for name in _COUNTS if isinstance(fields.get(name), int)), 0)
    chosen = _chosen_layers(fields, total)
    grouped = fields.get("num_key_value_heads") != fields.get("num_attention_heads")
    for name, value in fields.items():
        if name == "per_layer_config" and value:
            old = {int(index): entries for index, entries in value.items()}
            fields[name] = {new: old[index] for new, index in enumerate(chosen) if index in old}
            for entries in fields[name].values():
                _shrink(entries)
        elif isinstance(value, dict) and name != "rope_parameters":
            _shrink(value)
        elif isinstance(value, bool) or name in _LAYERS_KEPT:
            continue
        elif "token_i" in name and value is not None:
            fields[name] = _token(name, value)
        elif isinstance(value, int):
            alias = "num_attention_heads" if name == "num_key_value_heads" and not grouped else name
            fields[name] = _bounded(alias, value, len(chosen))
        elif isinstance(value, list) and total and len(value) == total:
            kept = [value[index] for index in chosen]
            fields[name] = [_bounded(name, v, len(chosen)) if type(v) is int else v for v in kept]


def _chosen_layers(fields: Mapping[str, Any], total: int) -> list[int]:
    """Return the indices of the first layer of each type, at most four, or of two layers of one type."""
    lists = [v for v in fields.values() if isinstance(v, list) and total and len(v) == total]
    kinds = list(zip(*lists, strict=True)) if lists else []
    first = sorted({kind: index for index, kind in reversed(list(enumerate(map(str, kinds))))}.values())[:4]
    return first if len(first) > 1 else list(range(2))


def _token(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return _token(name, value[0])
    if not isinstance(value, int) or value < VOCABULARY:
        return value
    return _TOKENS.get(name, 90 + sum(map(ord, name)) % 37)


def _bounded(name: str, value: int, layers: int) -> int:
    if re.fullmatch(_LAYERS, name):
        return min(value, layers)
    bound = next((bound for pattern, bound in _BOUNDS if re.fullmatch(pattern, name)), value)
    return min(value, bound)
