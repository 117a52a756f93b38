"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with plain linears and one key head for all queries."""

from __future__ import annotations

from slipstream.families.common import activation
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Interleaved, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = config.n_embd // config.n_head
    return BlockSpec(
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=1 if config.multi_query else config.n_head,
        head_dim=dim,
        ffn=config.n_inner or 4 * config.n_embd,
        norm=Norm("layer", config.layer_norm_epsilon),
        activation=activation(config),
        gated=False,
        scale=dim**-0.5 if config.scale_attn_weights else 1.0,
    )


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="transformer.h",
        embed="transformer.wte",
        pos_embed="transformer.wpe",
        head="lm_head",
        norm=Norm("layer", config.layer_norm_epsilon),
        final_norm="transformer.ln_f",
    )


def _refuse(config: Config) -> str | None:
    return "cross attention" if config.add_cross_attention else None


_TINY = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILY = Family(
    name="gpt_bigcode",
    layers=("GPTBigCodeBlock",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("ln_1"),
        Role.QKV: Interleaved("attn.c_attn"),
        Role.ATTN_OUT: Take("attn.c_proj"),
        Role.MLP_NORM: Take("ln_2"),
        Role.MLP_IN: Take("mlp.c_fc"),
        Role.MLP_OUT: Take("mlp.c_proj"),
    },
    frame=_frame,
    refuse=_refuse,
    tiny=(
        Tiny("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _TINY),
        Tiny(
            "GPTBigCodeForCausalLM",
            "GPTBigCodeConfig",
            {**_TINY, "multi_query": False, "n_inner": 80},
            "many keys",
        ),
        Tiny("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_TINY, "scale_attn_weights": False}, "unscaled"),
    ),
)
