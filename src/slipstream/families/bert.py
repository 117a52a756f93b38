"""BERT and the encoders that share its layer; two of them normalise before each branch instead of after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slipstream.families.common import bert_like, bert_tiny, field
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, EncoderSpec, Role, Rope
from slipstream.weights.recipe import Recipe, Stack, Take


def _post_norm(config: Config, index: int) -> BlockSpec:
    return bert_like(config, index, causal=config.is_decoder)


def _pre_norm(config: Config, index: int) -> BlockSpec:
    return bert_like(config, index, place="pre", causal=config.is_decoder)


def _esm(config: Config, index: int) -> BlockSpec:
    dim = config.hidden_size // config.num_attention_heads
    rotary = config.position_embedding_type == "rotary"
    # The class always uses its own GELU, whatever the config says.
    return bert_like(config, index, place="pre", activation="gelu", rope=Rope(dim) if rotary else None)


def _roformer(config: Config, index: int) -> BlockSpec:
    dim = config.hidden_size // config.num_attention_heads
    angles = Rope(dim, interleaved=True, table="half")
    return bert_like(config, index, rope=angles)


def _refuse_roformer(config: Config) -> str | None:
    return "rotary_value rotates values as well" if config.rotary_value else _refuse_decoder(config)


def _refuse(config: Config) -> str | None:
    return "add_cross_attention is True" if getattr(config, "add_cross_attention", False) else None


def _refuse_decoder(config: Config) -> str | None:
    why = "is_decoder is True, but some versions of transformers mask decoders like encoders"
    return why if config.is_decoder else None


def _around(config: Config) -> EncoderSpec:
    narrow = field(config, "embedding_size", default=config.hidden_size) != config.hidden_size
    return EncoderSpec(
        layers="encoder.layer",
        words="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        norm="embeddings.LayerNorm",
        types="embeddings.token_type_embeddings",
        project_in="embeddings_project" if narrow else None,
    )


def _around_counted(config: Config) -> EncoderSpec:
    return replace(_around(config), padding=config.pad_token_id)


BERT_RECIPES: Mapping[Role, Recipe] = {
    Role.QKV: Stack(tuple(f"attention.self.{part}" for part in ("query", "key", "value"))),
    Role.ATTN_OUT: Take("attention.output.dense"),
    Role.ATTN_NORM: Take("attention.output.LayerNorm"),
    Role.MLP_IN: Take("intermediate.dense"),
    Role.MLP_OUT: Take("output.dense"),
    Role.MLP_NORM: Take("output.LayerNorm"),
}


_ESM: dict[str, Any] = {"position_embedding_type": "rotary", "emb_layer_norm_before": False}


def _family(
    name: str,
    prefix: str,
    *,
    norms: tuple[str, str] | None = None,
    causal: str | None = "ForCausalLM",
    encoder: Callable[[Config], EncoderSpec] | None = None,
    **options: Any,
) -> Family:
    """Return a BERT-like family; `norms` are the norms before attention and feed-forward, if it has those."""
    first = {} if norms is None else {Role.ATTN_NORM: Take(norms[0]), Role.MLP_NORM: Take(norms[1])}
    config = f"{prefix}Config"
    tiny = [bert_tiny(f"{prefix}ForMaskedLM", config, **options)]
    if causal is not None:
        tiny.append(bert_tiny(f"{prefix}{causal}", config, label="causal", is_decoder=True, **options))
    return Family(
        name=name,
        layers=(f"{prefix}Layer",),
        spec=_post_norm if norms is None else _pre_norm,
        recipes={**BERT_RECIPES, **first},
        refuse=_refuse_decoder if causal is None else _refuse,
        encoder=encoder,
        tiny=tuple(tiny),
    )


def _encoder(name: str, layer: str, tiny: Tiny) -> Family:
    """Return the family of a class that is always an encoder, whatever its config says."""
    return Family(name=name, layers=(layer,), spec=bert_like, recipes=BERT_RECIPES, tiny=(tiny,))


FAMILIES = (
    _family("bert", "Bert", causal="LMHeadModel", encoder=_around),
    _family("roberta", "Roberta", encoder=_around_counted),
    _family("xlm-roberta", "XLMRoberta", encoder=_around_counted),
    _family("camembert", "Camembert", encoder=_around_counted),
    _family("electra", "Electra", encoder=_around, embedding_size=48),
    _family("ernie", "Ernie", use_task_id=True),
    _family("data2vec-text", "Data2VecText", encoder=_around_counted),
    _family("rembert", "RemBert", causal=None, input_embedding_size=48, output_embedding_size=80),
    _family(
        "roberta-prelayernorm", "RobertaPreLayerNorm", norms=("attention.LayerNorm", "intermediate.LayerNorm")
    ),
    _family("roc_bert", "RoCBert", enable_pronunciation=False, enable_shape=False),
    _family("megatron-bert", "MegatronBert", causal=None, norms=("attention.ln", "ln")),
    _encoder(
        "altclip_text", "AltRobertaLayer", bert_tiny("AltCLIPTextModel", "AltCLIPTextConfig", project_dim=32)
    ),
    _encoder("align_text", "AlignTextLayer", bert_tiny("AlignTextModel", "AlignTextConfig")),
    _encoder(
        "chinese_clip_text",
        "ChineseCLIPTextLayer",
        bert_tiny("ChineseCLIPTextModel", "ChineseCLIPTextConfig"),
    ),
    _encoder("clap_text", "ClapTextLayer", bert_tiny("ClapTextModel", "ClapTextConfig")),
    _encoder("layoutlm", "LayoutLMLayer", bert_tiny("LayoutLMForMaskedLM", "LayoutLMConfig")),
    _encoder("tapas", "TapasLayer", bert_tiny("TapasForMaskedLM", "TapasConfig")),
    _encoder("splinter", "SplinterLayer", bert_tiny("SplinterModel", "SplinterConfig")),
    _encoder("visual_bert", "VisualBertLayer", bert_tiny("VisualBertModel", "VisualBertConfig")),
    _encoder("markuplm", "MarkupLMLayer", bert_tiny("MarkupLMModel", "MarkupLMConfig")),
    Family(
        name="bert-generation",
        layers=("BertGenerationLayer",),
        spec=_post_norm,
        recipes=BERT_RECIPES,
        refuse=_refuse,
        tiny=(
            bert_tiny("BertGenerationDecoder", "BertGenerationConfig", is_decoder=True),
            bert_tiny("BertGenerationEncoder", "BertGenerationConfig", label="encoder"),
        ),
    ),
    Family(
        name="esm",
        layers=("EsmLayer",),
        spec=_esm,
        recipes={
            **BERT_RECIPES,
            Role.ATTN_NORM: Take("attention.LayerNorm"),
            Role.MLP_NORM: Take("LayerNorm"),
        },
        refuse=_refuse_decoder,
        tiny=(
            bert_tiny("EsmForMaskedLM", "EsmConfig", mask_token_id=3, **_ESM),
            bert_tiny(
                "EsmForMaskedLM",
                "EsmConfig",
                label="learned positions",
                mask_token_id=3,
                **{**_ESM, "position_embedding_type": "absolute"},
            ),
        ),
    ),
    Family(
        name="roformer",
        layers=("RoFormerLayer",),
        spec=_roformer,
        recipes=BERT_RECIPES,
        refuse=_refuse_roformer,
        tiny=(bert_tiny("RoFormerForMaskedLM", "RoFormerConfig"),),
    ),
    _family("xlm-roberta-xl", "XLMRobertaXL", norms=("attention.self_attn_layer_norm", "LayerNorm")),
)
