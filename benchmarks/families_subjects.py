"""The subjects of `families_cpu`: models of real but small shapes with random weights, and their tasks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["SUBJECTS", "TASKS", "TINY", "Kind", "Subject", "Task", "inputs_of", "like", "make"]

Kind = Literal["decoder", "encoder", "vision", "encoder-decoder", "reading", "speech", "sound"]

_FIRST_TOKEN = 5
"""The tokens below are special ones in most vocabularies."""
_SECOND = 16000
"""Samples of one second of sound, at the rate that speech models are trained for."""
_FRAMES = 3000
"""Frames of 30 seconds of sound: the only length that Whisper accepts."""
_SHORTER = 12
"""Tokens by which each row of a padded batch is shorter than the one before it."""


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
        kind: What it reads and writes; decides its tasks.
        model: Name of the class in transformers.
        config: Name of the config's class in transformers.
        shape: Config values that differ from the defaults.
    """

    kind: Kind
    model: str
    config: str
    shape: Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One call that is timed.

    Attributes:
        name: Its name in the results.
        batch: Number of sequences, pictures or recordings.
        tokens: Length of each prompt or text; 0 for pictures and sound.
        new_tokens: Number of tokens that are generated; 0 for a single forward.
        beams: Number of beams of each sequence; 1 is greedy search.
        padded: Whether the texts have different lengths.
    """

    name: str
    batch: int
    tokens: int = 0
    new_tokens: int = 0
    beams: int = 1
    padded: bool = False


TASKS: Mapping[Kind, tuple[Task, ...]] = {
    "decoder": (
        Task("generate_1x32", 1, 32, new_tokens=16),
        Task("generate_8x32", 8, 32, new_tokens=16),
        Task("prompt_1x512", 1, 512, new_tokens=1),
        Task("prompt_4x256", 4, 256, new_tokens=1),
    ),
    "encoder": (
        Task("encode_8x128", 8, 128),
        Task("encode_8x128_padded", 8, 128, padded=True),
        Task("encode_1x16", 1, 16),
        Task("encode_1x512", 1, 512),
    ),
    "vision": (Task("pictures_1", 1), Task("pictures_4", 4)),
    "encoder-decoder": (
        Task("generate_1x64", 1, 64, new_tokens=16),
        Task("generate_8x64", 8, 64, new_tokens=16),
        Task("beams_4x64", 1, 64, new_tokens=16, beams=4),
    ),
    "reading": (Task("read_1", 1, new_tokens=16), Task("read_4", 4, new_tokens=16)),
    "speech": (Task("generate_30s", 1, new_tokens=16),),
    "sound": (Task("encode_1s", 1),),
}
"""The tasks of each kind of subject. A prompt goes through `generate`, which makes one token of it."""


def _llama(width: int, ffn: int, layers: int, heads: tuple[int, int], **others: Any) -> dict[str, Any]:
    """Return a shape with the config names of Llama; `heads` are query heads and key-value heads."""
    return {
        "vocab_size": 32000,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        **others,
    }


def _decoder(name: str, shape: Mapping[str, Any]) -> Subject:
    return Subject("decoder", f"{name}ForCausalLM", f"{name}Config", shape)


def _gemma4(width: int, ffn: int, layers: int, heads: tuple[int, int], **others: Any) -> Subject:
    shape = _llama(width, ffn, layers, heads, sliding_window=512, **others)
    return Subject("decoder", "Gemma4ForCausalLM", "Gemma4TextConfig", shape)


_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 256}
_GROUPED = {**_EXPERTS, "n_routed_experts": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "shared_expert_intermediate_size": 256,
    "num_experts": 16,
}


def _bart(width: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    """Return a shape with the config names of BART, the same for encoder and decoder."""
    return {
        "vocab_size": 32000,
        "d_model": width,
        **{f"{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": ffn for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": heads for side in ("encoder", "decoder")},
    }


_DEIT = {"num_attention_heads": 6, "intermediate_size": 1536, "image_size": 384}


def _reading(encoder: Mapping[str, Any], layers: int, vocabulary: int, width: int) -> Subject:
    """Return a model of a DeiT that reads pictures and a TrOCR decoder."""
    decoder = {
        "model_type": "trocr",
        "vocab_size": vocabulary,
        "d_model": width,
        "decoder_layers": layers,
        "decoder_attention_heads": 8,
        "decoder_ffn_dim": 4 * width,
        "cross_attention_hidden_size": encoder["hidden_size"],
    }
    parts = {"encoder": {"model_type": "deit", **encoder}, "decoder": decoder}
    tokens = {"decoder_start_token_id": 2, "pad_token_id": 1}
    return Subject("reading", "VisionEncoderDecoderModel", "VisionEncoderDecoderConfig", {**parts, **tokens})


_DECODERS = {
    "gpt2": Subject("decoder", "GPT2LMHeadModel", "GPT2Config", {}),
    "opt": _decoder("OPT", {"ffn_dim": 3072, "word_embed_proj_dim": 768}),
    "bloom": _decoder("Bloom", {"hidden_size": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 32000}),
    "falcon": _decoder(
        "Falcon",
        {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 32000},
    ),
    "gpt_neox": _decoder(
        "GPTNeoX",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 32000,
        },
    ),
    "phi": _decoder("Phi", _llama(1024, 4096, 12, (16, 16))),
    "qwen2": _decoder("Qwen2", _llama(896, 4864, 12, (14, 2))),
    "qwen3": _decoder("Qwen3", _llama(1024, 3072, 14, (16, 8), head_dim=128)),
    "gemma2": _decoder("Gemma2", _llama(768, 3072, 12, (8, 4), head_dim=128)),
    "gemma3": Subject(
        "decoder",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _llama(640, 2048, 18, (4, 1), head_dim=256, sliding_window=512),
    ),
    # Half of the layers borrow keys and values; each has an input of its own.
    "gemma4": _gemma4(
        768,
        3072,
        12,
        (8, 1),
        head_dim=128,
        global_head_dim=256,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 3,
        hidden_size_per_layer_input=128,
        vocab_size_per_layer_input=32000,
        num_kv_shared_layers=6,
        use_double_wide_mlp=True,
    ),
    # Four streams of states, a narrow branch, sparse gates in the first layers.
    "gemma3n": Subject(
        "decoder",
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        _llama(
            768,
            3072,
            12,
            (8, 2),
            head_dim=128,
            sliding_window=512,
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 3,
            hidden_size_per_layer_input=128,
            vocab_size_per_layer_input=32000,
            num_kv_shared_layers=6,
            activation_sparsity_pattern=[0.95] * 4 + [0.0] * 8,
        ),
    ),
    "granite": _decoder("Granite", _llama(768, 2048, 12, (12, 4))),
    "olmo2": _decoder("Olmo2", _llama(768, 2048, 12, (12, 12))),
    # Mixtures of experts.
    "mixtral": _decoder("Mixtral", _llama(512, 1024, 8, (8, 4))),
    "qwen3_moe": _decoder("Qwen3Moe", _llama(512, 1024, 8, (8, 4), head_dim=64, num_experts=32, **_EXPERTS)),
    "gpt_oss": _decoder("GptOss", _llama(512, 512, 8, (8, 4), head_dim=64, num_local_experts=8)),
    "gemma4_moe": _gemma4(
        512,
        1024,
        8,
        (8, 4),
        head_dim=64,
        global_head_dim=128,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=32,
        top_k_experts=4,
        moe_intermediate_size=256,
    ),
    "glm4_moe": _decoder("Glm4Moe", _llama(512, 1024, 8, (8, 4), head_dim=64, **_GROUPED)),
    # Latent attention, linear attention, short convolutions, a state space.
    "deepseek_v3": _decoder("DeepseekV3", _llama(512, 1024, 8, (8, 8), **_GROUPED)),
    "qwen3_next": _decoder("Qwen3Next", _llama(512, 1024, 8, (8, 2), head_dim=64, **_LINEAR, **_EXPERTS)),
    "qwen3_5_text": Subject(
        "decoder",
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        _llama(768, 2560, 8, (6, 2), head_dim=128, linear_num_value_heads=12, linear_num_key_heads=12),
    ),
    "lfm2": _decoder(
        "Lfm2",
        _llama(768, 2048, 10, (12, 4), layer_types=["conv", "conv", "full_attention"] * 3 + ["conv"]),
    ),
    "granitemoehybrid": _decoder(
        "GraniteMoeHybrid",
        _llama(
            768,
            256,
            8,
            (12, 4),
            layer_types=["mamba"] * 3 + ["attention"] + ["mamba"] * 4,
            num_local_experts=16,
            num_experts_per_tok=4,
            shared_intermediate_size=1024,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_d_state=128,
            attention_multiplier=0.125,
            residual_multiplier=0.22,
        ),
    ),
    "jamba": _decoder(
        "Jamba",
        _llama(
            768,
            2048,
            8,
            (12, 4),
            attn_layer_period=4,
            attn_layer_offset=2,
            num_experts=8,
            num_experts_per_tok=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
        ),
    ),
    "mamba2": _decoder(
        "Mamba2",
        {
            "vocab_size": 50288,
            "hidden_size": 768,
            "num_hidden_layers": 24,
            "num_heads": 24,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
        },
    ),
    "falcon_h1": _decoder(
        "FalconH1",
        _llama(
            768,
            2048,
            10,
            (8, 2),
            head_dim=64,
            mamba_d_ssm=1536,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_d_state=128,
            key_multiplier=0.4,
            attention_out_multiplier=0.9,
            ssm_in_multiplier=1.25,
            ssm_out_multiplier=0.24,
            mlp_multipliers=[0.9, 0.6],
        ),
    ),
    "nemotron_h": _decoder(
        "NemotronH",
        {
            **_llama(768, 3072, 12, (12, 4), head_dim=64),
            "layers_block_type": (["linear_attention", "mlp"] * 2 + ["full_attention", "mlp"]) * 2,
            "mamba_num_heads": 24,
            "mamba_head_dim": 64,
        },
    ),
    "bert_decoder": Subject(
        "decoder", "BertLMHeadModel", "BertConfig", {"is_decoder": True, "max_position_embeddings": 1024}
    ),
    "mamba": _decoder(
        "Mamba",
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "vocab_size": 32000,
            "initializer_range": 0.02,  # with the default of 0.1, rounding errors grow 30 to 60 times
        },
    ),
}
_DEBERTA: dict[str, Any] = {
    "vocab_size": 30000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
}
_ENCODERS = {
    "bert": Subject("encoder", "BertModel", "BertConfig", {}),
    # RoBERTa and MPNet number positions from 2, so that their 514 are enough for 512 tokens.
    "roberta": Subject(
        "encoder", "RobertaModel", "RobertaConfig", {"vocab_size": 30000, "max_position_embeddings": 514}
    ),
    "distilbert": Subject("encoder", "DistilBertModel", "DistilBertConfig", {}),
    "electra": Subject("encoder", "ElectraModel", "ElectraConfig", {}),
    "mpnet": Subject("encoder", "MPNetModel", "MPNetConfig", {"max_position_embeddings": 514}),
    "modernbert": Subject(
        "encoder",
        "ModernBertModel",
        "ModernBertConfig",
        {"vocab_size": 30000, "pad_token_id": 0, "num_hidden_layers": 12},
    ),
    "deberta_v2": Subject("encoder", "DebertaV2Model", "DebertaV2Config", _DEBERTA),
}
_OTHERS = {
    # The sizes of trocr-small, with half of the layers.
    "trocr": _reading({**_DEIT, "hidden_size": 384, "num_hidden_layers": 6}, 6, 32000, 256),
    "vit": Subject("vision", "ViTModel", "ViTConfig", {}),
    "dinov2": Subject(
        "vision",
        "Dinov2Model",
        "Dinov2Config",
        {"hidden_size": 384, "num_attention_heads": 6, "image_size": 224},
    ),
    "swin": Subject("vision", "SwinModel", "SwinConfig", {}),
    "clip": Subject("vision", "CLIPVisionModel", "CLIPVisionConfig", {"num_hidden_layers": 6}),
    "siglip": Subject("vision", "SiglipVisionModel", "SiglipVisionConfig", {"num_hidden_layers": 6}),
    "t5": Subject("encoder-decoder", "T5ForConditionalGeneration", "T5Config", {"decoder_start_token_id": 0}),
    "bart": Subject("encoder-decoder", "BartForConditionalGeneration", "BartConfig", _bart(768, 3072, 6, 12)),
    "marian": Subject(
        "encoder-decoder",
        "MarianMTModel",
        "MarianConfig",
        {**_bart(512, 2048, 6, 8), "pad_token_id": 0, "decoder_start_token_id": 0},
    ),
    "whisper": Subject(
        "speech",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_bart(384, 1536, 4, 6), "vocab_size": 51865},
    ),
    "wav2vec2": Subject("sound", "Wav2Vec2Model", "Wav2Vec2Config", {"num_hidden_layers": 6}),
}
SUBJECTS: Mapping[str, Subject] = {**_DECODERS, **_ENCODERS, **_OTHERS}
"""By name; each has at most 0.3 billion parameters."""
"""By name; each has at most 0.3 billion parameters."""

_TINY_PAIR: dict[str, Any] = {**_bart(64, 128, 2, 4), "vocab_size": 500}
_TINY_TEXT: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TINY_SEEN = {name: value for name, value in _TINY_TEXT.items() if name != "vocab_size"}
TINY: Mapping[str, Subject] = {
    "tiny_llama": Subject("decoder", "LlamaForCausalLM", "LlamaConfig", _TINY_TEXT),
    "tiny_mixtral": Subject(
        "decoder", "MixtralForCausalLM", "MixtralConfig", {**_TINY_TEXT, "num_key_value_heads": 2}
    ),
    "tiny_bert": Subject("encoder", "BertModel", "BertConfig", _TINY_TEXT),
    "tiny_vit": Subject("vision", "ViTModel", "ViTConfig", {**_TINY_SEEN, "image_size": 64}),
    "tiny_bart": Subject("encoder-decoder", "BartForConditionalGeneration", "BartConfig", _TINY_PAIR),
    "tiny_trocr": _reading({**_TINY_SEEN, "image_size": 64}, 1, 512, 64),
    "tiny_whisper": Subject(
        "speech",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_bart(64, 128, 1, 4), "vocab_size": 51865},
    ),
    "tiny_wav2vec2": Subject(
        "sound", "Wav2Vec2Model", "Wav2Vec2Config", {**_TINY_SEEN, "conv_dim": (64,) * 7}
    ),
}
"""One subject of each kind or more, for `--quick` and the tests."""


def make(subject: Subject, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """Make a model with transformers' random weights, in eval mode; no token ends its generation early."""
    import transformers

    torch.manual_seed(seed)
    drawn = getattr(transformers, subject.model)(getattr(transformers, subject.config)(**subject.shape))
    return like(drawn, dtype)


def like(model: Any, dtype: torch.dtype) -> Any:
    """Copy a model as `from_pretrained(dtype=...)` loads it: tables and some parameters stay in float32."""
    copied = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict={name: tensor.clone() for name, tensor in model.state_dict().items()},
        dtype=dtype,
    )
    if copied.can_generate():
        copied.generation_config.eos_token_id = copied.generation_config.forced_eos_token_id = None
    return copied.eval()


def inputs_of(subject: Subject, task: Task, config: Any, *, seed: int = 1) -> dict[str, Tensor]:
    """Return random inputs for a task, by the names of the arguments; pictures and sound in float32."""
    generator = torch.Generator().manual_seed(seed)
    match subject.kind:
        case "vision":
            side = config.image_size
            return {"pixel_values": torch.randn(task.batch, 3, side, side, generator=generator)}
        case "reading":
            side = config.encoder.image_size
            return {"pixel_values": torch.randn(task.batch, 3, side, side, generator=generator)}
        case "speech":
            features = torch.randn(task.batch, config.num_mel_bins, _FRAMES, generator=generator)
            return {"input_features": features}
        case "sound":
            return {"input_values": torch.randn(task.batch, _SECOND, generator=generator)}
    shape = (task.batch, task.tokens)
    ids = torch.randint(_FIRST_TOKEN, config.vocab_size, shape, generator=generator)
    mask = torch.ones_like(ids)
    if task.padded:
        for row in range(task.batch):
            mask[row, task.tokens - _SHORTER * row :] = 0
        ids = ids.masked_fill(mask == 0, config.pad_token_id)
    return {"input_ids": ids, "attention_mask": mask}
