"""ModernBERT, encoder and decoder: gated, rotary; most layers have a window and their own angles."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import bert_tiny, layer_type, plain_like
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role, Rope
from slipstream.weights.recipe import First, Recipe, Stack, Take


def _layer(config: Config, index: int, size: int, **changes: Any) -> BlockSpec:
    """Return the spec of a layer whose window, if it has one, is `size`."""
    kind, dim = layer_type(config, index), config.hidden_size // config.num_attention_heads
    return plain_like(
        config,
        index,
        norm=Norm("layer", config.norm_eps),
        activation=config.hidden_activation,
        gated=True,
        rope=Rope(dim, layer_type=kind),
        window=size if kind == "sliding_attention" else None,
        **changes,
    )


def _encoder(config: Config, index: int) -> BlockSpec:
    return _layer(config, index, config.local_attention, causal=False)


def _decoder(config: Config, index: int) -> BlockSpec:
    return _layer(config, index, config.sliding_window)


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="model.layers",
        embed="model.embeddings.tok_embeddings",
        embed_norm="model.embeddings.norm",
        norm=Norm("layer", config.norm_eps),
        final_norm="model.final_norm",
        project_out="lm_head.dense",
        out_activation=config.classifier_activation,
        out_norm="lm_head.norm",
        head="decoder",
        rotary="model.rotary_emb",
    )


_RECIPES: dict[Role, Recipe] = {
    Role.ATTN_NORM: Take("attn_norm"),
    Role.QKV: First((Take("attn.Wqkv"), Stack(tuple(f"attn.{part}_proj" for part in "qkv")))),
    Role.ATTN_OUT: Take("attn.Wo"),
    Role.MLP_NORM: Take("mlp_norm"),
    Role.MLP_IN: Take("mlp.Wi"),
    Role.MLP_OUT: Take("mlp.Wo"),
}
_TINY: dict[str, Any] = {"num_hidden_layers": 5, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}

_BIASED: dict[str, Any] = {
    **_TINY,
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "classifier_activation": "silu",
}

FAMILIES = tuple(
    Family(
        name=name,
        layers=(layer,),
        spec=spec,
        frame=frame,
        recipes=_RECIPES,
        tiny=(bert_tiny(*built, **_TINY), bert_tiny(*built, label="biases", **_BIASED)),
    )
    for name, layer, spec, frame, built in (
        (
            "modernbert",
            "ModernBertEncoderLayer",
            _encoder,
            None,
            ("ModernBertForMaskedLM", "ModernBertConfig"),
        ),
        (
            "modernbert-decoder",
            "ModernBertDecoderLayer",
            _decoder,
            _frame,
            ("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig"),
        ),
    )
)
