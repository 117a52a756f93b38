"""Nomic-BERT: a gated feed-forward and rotary positions, normalised after each sum as BERT is."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, bert_like, bert_tiny, head_dim, rope
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = head_dim(config)
    return bert_like(config, index, head_dim=dim, scale=dim**-0.5, gated=True, rope=rope(config))


FAMILY = Family(
    name="nomic_bert",
    layers=("NomicBertLayer",),
    spec=_spec,
    recipes={
        **LLAMA_RECIPES,
        Role.ATTN_NORM: Take("post_attention_layernorm"),
        Role.MLP_NORM: Take("post_mlp_layernorm"),
    },
    tiny=(bert_tiny("NomicBertForMaskedLM", "NomicBertConfig"),),
)
