"""The first GPT: norms after the residual sums, a causal mask in the layer itself, no cache."""

from __future__ import annotations

from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import Conv1D, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = config.n_embd // config.n_head
    return BlockSpec(
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=dim,
        ffn=4 * config.n_embd,
        norm=Norm("layer", config.layer_norm_epsilon),
        place="post",
        activation="gelu_new" if config.afn == "gelu" else config.afn,
        gated=False,
        scale=dim**-0.5,
        mask="padding",
    )


_TINY = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}

# No frame: its `generate` counts padding in positions, and a packed batch has no padding.
FAMILY = Family(
    name="openai-gpt",
    layers=("modeling_openai.Block",),
    spec=_spec,
    recipes={
        Role.QKV: Conv1D("attn.c_attn"),
        Role.ATTN_OUT: Conv1D("attn.c_proj"),
        Role.ATTN_NORM: Take("ln_1"),
        Role.MLP_IN: Conv1D("mlp.c_fc"),
        Role.MLP_OUT: Conv1D("mlp.c_proj"),
        Role.MLP_NORM: Take("ln_2"),
    },
    tiny=(
        Tiny("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", _TINY),
        Tiny("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", {**_TINY, "afn": "silu"}, "silu"),
    ),
)
