"""BLOOM: ALiBi, q, k and v of each head together, a norm after the embedding."""

from __future__ import annotations

from slipstream.families.common import alibi_slopes
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Interleaved, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = config.hidden_size // config.n_head
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=dim,
        ffn=4 * config.hidden_size,
        norm=Norm("layer", config.layer_norm_epsilon),
        residual_from="norm" if config.apply_residual_connection_post_layernorm else "input",
        activation="gelu_pytorch_tanh",
        gated=False,
        scale=dim**-0.5,
        alibi=alibi_slopes(config.n_head),
    )


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="transformer.h",
        embed="transformer.word_embeddings",
        embed_norm="transformer.word_embeddings_layernorm",
        head="lm_head",
        norm=Norm("layer", config.layer_norm_epsilon),
        final_norm="transformer.ln_f",
    )


def _refuse(config: Config) -> str | None:
    sliced = config.pretraining_tp > 1 and config.slow_but_exact
    return "slow_but_exact omits the biases of sliced projections" if sliced else None


_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILY = Family(
    name="bloom",
    layers=("BloomBlock",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("input_layernorm"),
        Role.QKV: Interleaved("self_attention.query_key_value"),
        Role.ATTN_OUT: Take("self_attention.dense"),
        Role.MLP_NORM: Take("post_attention_layernorm"),
        Role.MLP_IN: Take("mlp.dense_h_to_4h"),
        Role.MLP_OUT: Take("mlp.dense_4h_to_h"),
    },
    frame=_frame,
    refuse=_refuse,
    tiny=(
        Tiny("BloomForCausalLM", "BloomConfig", _TINY),
        Tiny(
            "BloomForCausalLM",
            "BloomConfig",
            {**_TINY, "hidden_size": 96, "n_head": 6, "apply_residual_connection_post_layernorm": True},
            "six heads, residual after the norm",
        ),
    ),
)
