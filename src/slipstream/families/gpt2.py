"""GPT-2: learned positions, matrices stored `(in, out)`."""

from __future__ import annotations

from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Conv1D, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = config.n_embd // config.n_head
    scale = dim**-0.5 if config.scale_attn_weights else 1.0
    return BlockSpec(
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=dim,
        ffn=config.n_inner or 4 * config.n_embd,
        norm=Norm("layer", config.layer_norm_epsilon),
        activation=config.activation_function,
        gated=False,
        scale=scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale,
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
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILY = Family(
    name="gpt2",
    layers=("GPT2Block",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("ln_1"),
        Role.QKV: Conv1D("attn.c_attn"),
        Role.ATTN_OUT: Conv1D("attn.c_proj"),
        Role.MLP_NORM: Take("ln_2"),
        Role.MLP_IN: Conv1D("mlp.c_fc"),
        Role.MLP_OUT: Conv1D("mlp.c_proj"),
    },
    frame=_frame,
    refuse=_refuse,
    tiny=(
        Tiny("GPT2LMHeadModel", "GPT2Config", _TINY),
        Tiny(
            "GPT2LMHeadModel",
            "GPT2Config",
            {**_TINY, "scale_attn_by_inverse_layer_idx": True, "n_inner": 80},
            "scale by layer",
        ),
    ),
)
