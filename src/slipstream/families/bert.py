"""BERT and the encoders that share its layer: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import TINY, activation, head_dim
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = head_dim(config)
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=dim,
        ffn=config.intermediate_size,
        norm=Norm("layer", config.layer_norm_eps),
        place="post",
        activation=activation(config),
        gated=False,
        scale=dim**-0.5,
        causal=bool(config.is_decoder),
    )


def _refuse(config: Config) -> str | None:
    return "cross attention" if getattr(config, "add_cross_attention", False) else None


_RECIPES = {
    Role.QKV: Stack(tuple(f"attention.self.{part}" for part in ("query", "key", "value"))),
    Role.ATTN_OUT: Take("attention.output.dense"),
    Role.ATTN_NORM: Take("attention.output.LayerNorm"),
    Role.MLP_IN: Take("intermediate.dense"),
    Role.MLP_OUT: Take("output.dense"),
    Role.MLP_NORM: Take("output.LayerNorm"),
}


def _family(name: str, prefix: str, **options: Any) -> Family:
    config = {key: value for key, value in TINY.items() if key != "num_key_value_heads"} | options
    return Family(
        name=name,
        layers=(f"{prefix}Layer",),
        spec=_spec,
        recipes=_RECIPES,
        refuse=_refuse,
        tiny=(Tiny(f"{prefix}ForMaskedLM", f"{prefix}Config", config),),
    )


FAMILIES = (
    _family("bert", "Bert"),
    _family("roberta", "Roberta"),
    _family("xlm-roberta", "XLMRoberta"),
    _family("camembert", "Camembert"),
    _family("electra", "Electra", embedding_size=48),
    _family("ernie", "Ernie", use_task_id=True),
)
