"""GPT-NeoX Japanese: GPT-NeoX in sequence, without biases but for the last layer's attention."""

from __future__ import annotations

from slipstream.families.common import TINY, activation, head_dim, rope
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Interleaved, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = head_dim(config)
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=dim,
        ffn=int(config.hidden_size * config.intermediate_multiple_size),
        norm=Norm("layer", config.layer_norm_eps),
        activation=activation(config),
        gated=False,
        scale=dim**-0.5,
        rope=rope(config),
    )


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="gpt_neox_japanese.layers",
        embed="gpt_neox_japanese.embed_in",
        head="embed_out",
        norm=Norm("layer", config.layer_norm_eps),
        final_norm="gpt_neox_japanese.final_layer_norm",
        rotary="gpt_neox_japanese.rotary_emb",
    )


_TINY = {key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "intermediate_size")}

FAMILY = Family(
    name="gpt_neox_japanese",
    layers=("GPTNeoXJapaneseLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("input_layernorm"),
        Role.QKV: Interleaved("attention.query_key_value"),
        Role.ATTN_OUT: Take("attention.dense"),
        Role.MLP_NORM: Take("post_attention_layernorm"),
        Role.MLP_IN: Take("mlp.dense_h_to_4h"),
        Role.MLP_OUT: Take("mlp.dense_4h_to_h"),
    },
    frame=_frame,
    tiny=(Tiny("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", _TINY),),
)
