"""DistilBERT: BERT's layer under other names."""

from __future__ import annotations

from slipstream.families.common import bert_like
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, EncoderSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    norm = Norm("layer", 1e-12)
    return bert_like(config, index, ffn=config.hidden_dim, norm=norm, activation=config.activation)


def _around(config: Config) -> EncoderSpec:
    return EncoderSpec(
        layers="transformer.layer",
        words="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        norm="embeddings.LayerNorm",
    )


_TINY = {
    "vocab_size": 128,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 256,
}

FAMILY = Family(
    name="distilbert",
    layers=("modeling_distilbert.TransformerBlock",),
    spec=_spec,
    encoder=_around,
    recipes={
        Role.QKV: Stack(tuple(f"attention.{part}_lin" for part in "qkv")),
        Role.ATTN_OUT: Take("attention.out_lin"),
        Role.ATTN_NORM: Take("sa_layer_norm"),
        Role.MLP_IN: Take("ffn.lin1"),
        Role.MLP_OUT: Take("ffn.lin2"),
        Role.MLP_NORM: Take("output_layer_norm"),
    },
    tiny=(
        Tiny("DistilBertForMaskedLM", "DistilBertConfig", _TINY),
        Tiny(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            {**_TINY, "activation": "relu", "sinusoidal_pos_embds": True},
            "relu",
        ),
    ),
)
