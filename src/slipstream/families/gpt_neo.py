"""GPT-Neo: unscaled scores; every other layer has a window, which the layer itself applies to the mask."""

from __future__ import annotations

from slipstream.families.common import gpt_frame
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_dim=config.hidden_size // config.num_heads,
        ffn=config.intermediate_size or 4 * config.hidden_size,
        norm=Norm("layer", config.layer_norm_epsilon),
        activation=config.activation_function,
        gated=False,
        mask="padding",
        window=config.window_size if config.attention_layers[index] == "local" else None,
    )


_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": 5,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILY = Family(
    name="gpt_neo",
    layers=("GPTNeoBlock",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("ln_1"),
        Role.QKV: Stack(tuple(f"attn.attention.{part}_proj" for part in "qkv")),
        Role.ATTN_OUT: Take("attn.attention.out_proj"),
        Role.MLP_NORM: Take("ln_2"),
        Role.MLP_IN: Take("mlp.c_fc"),
        Role.MLP_OUT: Take("mlp.c_proj"),
    },
    frame=gpt_frame,
    tiny=(
        Tiny("GPTNeoForCausalLM", "GPTNeoConfig", _TINY),
        Tiny("GPTNeoForCausalLM", "GPTNeoConfig", {**_TINY, "intermediate_size": 80}, "own width"),
    ),
)
