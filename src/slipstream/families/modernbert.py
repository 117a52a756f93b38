"""ModernBERT: pre-norm, gated, rotary; most layers see a window, with angles of their own."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import bert_like, bert_tiny, layer_type
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, Role, Rope
from slipstream.weights.recipe import Take


def _spec(config: Config, index: int) -> BlockSpec:
    kind, dim = layer_type(config, index), config.hidden_size // config.num_attention_heads
    return bert_like(
        config,
        index,
        norm=Norm("layer", config.norm_eps),
        place="pre",
        activation=config.hidden_activation,
        gated=True,
        rope=Rope(dim, layer_type=kind),
        window=config.local_attention if kind == "sliding_attention" else None,
    )


_TINY: dict[str, Any] = {"num_hidden_layers": 5, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}

FAMILY = Family(
    name="modernbert",
    layers=("ModernBertEncoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("attn_norm"),
        Role.QKV: Take("attn.Wqkv"),
        Role.ATTN_OUT: Take("attn.Wo"),
        Role.MLP_NORM: Take("mlp_norm"),
        Role.MLP_IN: Take("mlp.Wi"),
        Role.MLP_OUT: Take("mlp.Wo"),
    },
    tiny=(
        bert_tiny("ModernBertForMaskedLM", "ModernBertConfig", **_TINY),
        bert_tiny(
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            label="biases",
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            **_TINY,
        ),
    ),
)
