"""BERT and the encoders that share its layer; two of them normalise before each branch instead of after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.families.common import bert_like, bert_tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Recipe, Stack, Take


def _post_norm(config: Config, index: int) -> BlockSpec:
    return bert_like(config, index, causal=config.is_decoder)


def _pre_norm(config: Config, index: int) -> BlockSpec:
    return bert_like(config, index, place="pre", causal=config.is_decoder)


def _refuse(config: Config) -> str | None:
    return "cross attention" if getattr(config, "add_cross_attention", False) else None


def _refuse_decoder(config: Config) -> str | None:
    return "decoders, which some versions of transformers mask like encoders" if config.is_decoder else None


_RECIPES: Mapping[Role, Recipe] = {
    Role.QKV: Stack(tuple(f"attention.self.{part}" for part in ("query", "key", "value"))),
    Role.ATTN_OUT: Take("attention.output.dense"),
    Role.ATTN_NORM: Take("attention.output.LayerNorm"),
    Role.MLP_IN: Take("intermediate.dense"),
    Role.MLP_OUT: Take("output.dense"),
    Role.MLP_NORM: Take("output.LayerNorm"),
}


def _family(
    name: str,
    prefix: str,
    *,
    norms: tuple[str, str] | None = None,
    causal: str | None = "ForCausalLM",
    **options: Any,
) -> Family:
    """One family of the kind; `norms` names those of attention and feed-forward where they come first."""
    first = {} if norms is None else {Role.ATTN_NORM: Take(norms[0]), Role.MLP_NORM: Take(norms[1])}
    config = f"{prefix}Config"
    tiny = [bert_tiny(f"{prefix}ForMaskedLM", config, **options)]
    if causal is not None:
        tiny.append(bert_tiny(f"{prefix}{causal}", config, label="causal", is_decoder=True, **options))
    return Family(
        name=name,
        layers=(f"{prefix}Layer",),
        spec=_post_norm if norms is None else _pre_norm,
        recipes={**_RECIPES, **first},
        refuse=_refuse_decoder if causal is None else _refuse,
        tiny=tuple(tiny),
    )


FAMILIES = (
    _family("bert", "Bert", causal="LMHeadModel"),
    _family("roberta", "Roberta"),
    _family("xlm-roberta", "XLMRoberta"),
    _family("camembert", "Camembert"),
    _family("electra", "Electra", embedding_size=48),
    _family("ernie", "Ernie", use_task_id=True),
    _family("data2vec-text", "Data2VecText"),
    _family("rembert", "RemBert", causal=None, input_embedding_size=48, output_embedding_size=80),
    _family(
        "roberta-prelayernorm", "RobertaPreLayerNorm", norms=("attention.LayerNorm", "intermediate.LayerNorm")
    ),
    _family("xlm-roberta-xl", "XLMRobertaXL", norms=("attention.self_attn_layer_norm", "LayerNorm")),
)
