"""ALBERT: BERT's layer under other names; one layer object is called many times."""

from __future__ import annotations

from slipstream.families.common import bert_like, bert_tiny
from slipstream.families.family import Family
from slipstream.spec import Role
from slipstream.weights.recipe import Stack, Take

FAMILY = Family(
    name="albert",
    layers=("AlbertLayer",),
    spec=bert_like,
    recipes={
        Role.QKV: Stack(("attention.query", "attention.key", "attention.value")),
        Role.ATTN_OUT: Take("attention.dense"),
        Role.ATTN_NORM: Take("attention.LayerNorm"),
        Role.MLP_IN: Take("ffn"),
        Role.MLP_OUT: Take("ffn_output"),
        Role.MLP_NORM: Take("full_layer_layer_norm"),
    },
    tiny=(
        bert_tiny("AlbertForMaskedLM", "AlbertConfig", embedding_size=48),
        bert_tiny(
            "AlbertForMaskedLM",
            "AlbertConfig",
            label="two groups of two",
            embedding_size=48,
            num_hidden_layers=4,
            num_hidden_groups=2,
            inner_group_num=2,
        ),
    ),
)
