"""BERT and the encoders that share its layer; two of them normalise before each branch instead of after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.families.common import bert_like, bert_tiny, field
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, EncoderSpec, FrameSpec, Norm, Role, Rope
from slipstream.weights.recipe import Recipe, Stack, Take


def _post_norm(config: Config, index: int) -> BlockSpec:
    asks = field(config, "add_cross_attention", default=False)
    cross = config.hidden_size if asks else None
    return bert_like(config, index, causal=config.is_decoder, cross=cross)


def _pre_norm(config: Config, index: int) -> BlockSpec:
    return replace(_post_norm(config, index), place="pre")


def _blip(config: Config, index: int) -> BlockSpec:
    # What a token sees is in the mask alone, whether the model encodes or decodes.
    return bert_like(config, index, cross=config.encoder_hidden_size if config.is_decoder else None)


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


@dataclass(frozen=True)
class _Head:
    """The parts before the vocabulary projection, and that one, by their paths in a causal language model.

    Attributes:
        dense: The linear after the layers; None for none.
        norm: The norm after it and its activation.
        last: The vocabulary projection.
        activation: The activation's name; None for the config's.
    """

    dense: str | None
    norm: str | None
    last: str
    activation: str | None = None


_PREDICTIONS = _Head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"
)
_LM_HEAD = _Head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "gelu")
_GENERATOR = _Head(
    "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", "gelu"
)


def _frame(
    root: str, head: _Head, *, counted: bool = False, **changes: str | bool | None
) -> Callable[[Config], FrameSpec | None]:
    """Return what makes the frame of a decoder.

    Args:
        root: Path of the module that runs the layers.
        head: What follows them.
        counted: The model numbers tokens from `pad_token_id + 1` on, and padding not at all.
        changes: Replace single fields of the frame.
    """
    words = f"{root}.embeddings"

    def frame(config: Config) -> FrameSpec | None:
        # Some embeddings are widened after their norm, and some have a row for the task as well.
        narrow = field(config, "embedding_size", default=config.hidden_size) != config.hidden_size
        others = narrow or field(config, "use_task_id", default=False)
        if others or not config.is_decoder or not isinstance(config.hidden_act, str):
            return None
        spec = FrameSpec(
            layers=f"{root}.encoder.layer",
            embed=f"{words}.word_embeddings",
            pos_embed=f"{words}.position_embeddings",
            type_embed=f"{words}.token_type_embeddings",
            embed_norm=f"{words}.LayerNorm",
            norm=Norm("layer", config.layer_norm_eps),
            project_out=head.dense,
            out_activation=None if head.dense is None else head.activation or config.hidden_act,
            out_norm=head.norm,
            head=head.last,
            pos_given=counted,
        )
        spec = replace(spec, **changes)  # type: ignore[arg-type]
        if not counted or not config.add_cross_attention:
            return spec
        # The decoder of a larger model: alone, a decoder is given positions from 0 by `generate`.
        padding = config.pad_token_id
        return replace(spec, pos_offset=padding + 1, pos_padding=padding, pos_given=False)

    return frame


BERT_RECIPES: Mapping[Role, Recipe] = {
    Role.QKV: Stack(tuple(f"attention.self.{part}" for part in ("query", "key", "value"))),
    Role.ATTN_OUT: Take("attention.output.dense"),
    Role.ATTN_NORM: Take("attention.output.LayerNorm"),
    Role.CROSS_Q: Take("crossattention.self.query"),
    Role.CROSS_KV: Stack(("crossattention.self.key", "crossattention.self.value")),
    Role.CROSS_OUT: Take("crossattention.output.dense"),
    Role.CROSS_NORM: Take("crossattention.output.LayerNorm"),
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
    frame: Callable[[Config], FrameSpec | None] | None = None,
    **options: Any,
) -> Family:
    """Return a BERT-like family; `norms` are the norms before attention and feed-forward, if it has those."""
    first: dict[Role, Recipe] = {}
    if norms is not None:
        own, feeding = (Take(path) for path in norms)
        across = Take(f"cross{norms[0]}")
        first = {Role.ATTN_NORM: own, Role.CROSS_NORM: across, Role.MLP_NORM: feeding}
    config = f"{prefix}Config"
    tiny = [bert_tiny(f"{prefix}ForMaskedLM", config, **options)]
    if causal is not None:
        tiny.append(bert_tiny(f"{prefix}{causal}", config, label="causal", is_decoder=True, **options))
    family = Family(
        name=name,
        layers=(f"{prefix}Layer",),
        spec=_post_norm if norms is None else _pre_norm,
        recipes={**BERT_RECIPES, **first},
        encoder=encoder,
        frame=frame,
        tiny=tuple(tiny),
    )
    return family if causal is not None else replace(family, refuse=_refuse_decoder)


def _counted(name: str, prefix: str, root: str | None = None) -> Family:
    """Return a family with RoBERTa's head and numbering; `root` is the path of its layers' module."""
    frame = _frame(root or name, _LM_HEAD, counted=True)
    return _family(name, prefix, encoder=_around_counted, frame=frame)


def _encoder(name: str, layer: str, tiny: Tiny) -> Family:
    """Return the family of a class that is always an encoder, whatever its config says."""
    return Family(name=name, layers=(layer,), spec=bert_like, recipes=BERT_RECIPES, tiny=(tiny,))


FAMILIES = (
    _family("bert", "Bert", causal="LMHeadModel", encoder=_around, frame=_frame("bert", _PREDICTIONS)),
    _counted("roberta", "Roberta"),
    _counted("xlm-roberta", "XLMRoberta", "roberta"),
    _counted("camembert", "Camembert", "roberta"),
    _family("electra", "Electra", encoder=_around, embedding_size=48, frame=_frame("electra", _GENERATOR)),
    _family("ernie", "Ernie", use_task_id=True, frame=_frame("ernie", _PREDICTIONS)),
    _counted("data2vec-text", "Data2VecText", "data2vec_text"),
    _family("rembert", "RemBert", causal=None, input_embedding_size=48, output_embedding_size=80),
    _family(
        "roberta-prelayernorm",
        "RobertaPreLayerNorm",
        norms=("attention.LayerNorm", "intermediate.LayerNorm"),
        frame=_frame(
            "roberta_prelayernorm", _LM_HEAD, counted=True, final_norm="roberta_prelayernorm.LayerNorm"
        ),
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
        name="blip_text_model",
        layers=("BlipTextLayer",),
        spec=_blip,
        recipes=BERT_RECIPES,
        frame=_frame("bert", _PREDICTIONS, type_embed=None, attends_padding=True),
        unread=frozenset({"encoder_attention_mask"}),
        tiny=(
            bert_tiny("BlipTextModel", "BlipTextConfig", is_decoder=False),
            bert_tiny("BlipTextLMHeadModel", "BlipTextConfig", label="causal", encoder_hidden_size=48),
        ),
    ),
    Family(
        name="bert-generation",
        layers=("BertGenerationLayer",),
        spec=_post_norm,
        recipes=BERT_RECIPES,
        frame=_frame("bert", _Head(None, None, "lm_head.decoder"), type_embed=None),
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
    _family(
        "xlm-roberta-xl",
        "XLMRobertaXL",
        norms=("attention.self_attn_layer_norm", "LayerNorm"),
        frame=_frame(
            "roberta", _LM_HEAD, counted=True, embed_norm=None, final_norm="roberta.encoder.LayerNorm"
        ),
    ),
)
