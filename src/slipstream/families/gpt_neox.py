"""GPT-NeoX (Pythia, StableLM-alpha) and its Japanese cousin: fused projections with q, k and v of each head together."""

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
        ffn=config.intermediate_size,
        norm=Norm("layer", config.layer_norm_eps),
        parallel=config.use_parallel_residual,
        activation=activation(config),
        gated=False,
        scale=dim**-0.5,
        rope=rope(config),
    )


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="gpt_neox.layers",
        embed="gpt_neox.embed_in",
        head="lm_head",
        norm=Norm("layer", config.layer_norm_eps),
        final_norm="gpt_neox.final_layer_norm",
        rotary="gpt_neox.rotary_emb",
    )


_TINY = {key: value for key, value in TINY.items() if key != "num_key_value_heads"} | {"rotary_pct": 0.5}

FAMILY = Family(
    name="gpt_neox",
    layers=("GPTNeoXLayer",),
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
    tiny=(
        Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", _TINY),
        Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_TINY, "use_parallel_residual": False}, "sequential"),
        Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_TINY, "attention_bias": False, "rotary_pct": 1.0}, "no bias, whole head"),
    ),
)
