"""MPT: always ALiBi, whatever its config says; no biases; a mask that is true where a key is hidden."""

from __future__ import annotations

import math

from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Take


def _slopes(heads: int) -> tuple[float, ...]:
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** -(8 * number / power) for number in range(1, power + 1)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


def _spec(config: Config, index: int) -> BlockSpec:
    dim, attention = config.hidden_size // config.n_heads, config.attn_config
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.n_heads,
        kv_heads=config.n_heads,
        head_dim=dim,
        ffn=4 * config.hidden_size,
        norm=Norm("layer", config.layer_norm_epsilon),
        activation="gelu",
        gated=False,
        scale=dim**-0.5 if attention.softmax_scale is None else attention.softmax_scale,
        mask="hidden",
        alibi=_slopes(config.n_heads),
        clip_qkv=attention.clip_qkv or None,
    )


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="transformer.blocks",
        embed="transformer.wte",
        head="lm_head",
        norm=Norm("layer", config.layer_norm_epsilon),
        final_norm="transformer.norm_f",
    )


_TINY = {
    "vocab_size": 128,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILY = Family(
    name="mpt",
    layers=("MptBlock",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("norm_1"),
        Role.QKV: Take("attn.Wqkv"),
        Role.ATTN_OUT: Take("attn.out_proj"),
        Role.MLP_NORM: Take("norm_2"),
        Role.MLP_IN: Take("ffn.up_proj"),
        Role.MLP_OUT: Take("ffn.down_proj"),
    },
    frame=_frame,
    tiny=(
        Tiny("MptForCausalLM", "MptConfig", _TINY),
        Tiny(
            "MptForCausalLM",
            "MptConfig",
            {**_TINY, "d_model": 96, "n_heads": 6, "attn_config": {"clip_qkv": 0.3, "softmax_scale": 0.2}},
            "six heads, clipped, own scale",
        ),
    ),
)
