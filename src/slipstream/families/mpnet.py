"""MPNet: BERT's layer with a learned bias by relative position, which the model passes to every layer."""

from __future__ import annotations

from slipstream.families.common import bert_like, bert_tiny
from slipstream.families.family import Family
from slipstream.spec import Role
from slipstream.weights.recipe import Stack, Take

FAMILY = Family(
    name="mpnet",
    layers=("MPNetLayer",),
    spec=bert_like,
    recipes={
        Role.QKV: Stack(tuple(f"attention.attn.{part}" for part in "qkv")),
        Role.ATTN_OUT: Take("attention.attn.o"),
        Role.ATTN_NORM: Take("attention.LayerNorm"),
        Role.MLP_IN: Take("intermediate.dense"),
        Role.MLP_OUT: Take("output.dense"),
        Role.MLP_NORM: Take("output.LayerNorm"),
    },
    tiny=(bert_tiny("MPNetForMaskedLM", "MPNetConfig"),),
)
