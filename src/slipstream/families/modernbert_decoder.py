"""ModernBERT as a decoder: its layer, causal, with its projections apart."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import bert_tiny, layer_type, plain_like
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, Role, Rope
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    kind, dim = layer_type(config, index), config.hidden_size // config.num_attention_heads
    return plain_like(
        config,
        index,
        norm=Norm("layer", config.norm_eps),
        activation=config.hidden_activation,
        gated=True,
        rope=Rope(dim, layer_type=kind),
        window=config.sliding_window if kind == "sliding_attention" else None,
    )


_TINY: dict[str, Any] = {"num_hidden_layers": 5, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}

FAMILY = Family(
    name="modernbert-decoder",
    layers=("ModernBertDecoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("attn_norm"),
        Role.QKV: Stack(tuple(f"attn.{part}_proj" for part in "qkv")),
        Role.ATTN_OUT: Take("attn.Wo"),
        Role.MLP_NORM: Take("mlp_norm"),
        Role.MLP_IN: Take("mlp.Wi"),
        Role.MLP_OUT: Take("mlp.Wo"),
    },
    tiny=(
        bert_tiny("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", **_TINY),
        bert_tiny(
            "ModernBertDecoderForCausalLM",
            "ModernBertDecoderConfig",
            label="biases",
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            **_TINY,
        ),
    ),
)
