"""Nomic-BERT, GTE and Jina's embeddings: rotary positions, and norms after each residual sum, as in BERT."""

from __future__ import annotations

from dataclasses import replace

from slipstream.families.common import LLAMA_RECIPES, bert_like, bert_tiny, head_dim, rope
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = head_dim(config)
    return bert_like(config, index, head_dim=dim, scale=dim**-0.5, gated=True, rope=rope(config))


def _plain(config: Config, index: int) -> BlockSpec:
    return replace(_spec(config, index), gated=False)


_RECIPES = {
    **LLAMA_RECIPES,
    Role.ATTN_NORM: Take("post_attention_layernorm"),
    Role.MLP_NORM: Take("post_mlp_layernorm"),
}

FAMILIES = (
    Family(
        name="nomic_bert",
        layers=("NomicBertLayer",),
        spec=_spec,
        recipes=_RECIPES,
        tiny=(bert_tiny("NomicBertForMaskedLM", "NomicBertConfig"),),
    ),
    Family(
        name="gte",
        layers=("GteLayer",),
        spec=_spec,
        recipes=_RECIPES,
        tiny=(bert_tiny("GteForMaskedLM", "GteConfig"),),
    ),
    Family(
        name="jina_embeddings_v3",
        layers=("JinaEmbeddingsV3Layer",),
        spec=_plain,
        recipes={**_RECIPES, Role.MLP_IN: Take("mlp.fc1"), Role.MLP_OUT: Take("mlp.fc2")},
        tiny=(bert_tiny("JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3Config"),),
    ),
)
