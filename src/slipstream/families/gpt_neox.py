"""GPT-NeoX (Pythia, Dolly) and GPT-NeoX Japanese: one projection with q, k and v of each head together."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import TINY, activation, field, head_dim, rope
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Interleaved, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim, hidden = head_dim(config), config.hidden_size
    width = field(config, "intermediate_size")
    return BlockSpec(
        hidden=hidden,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=dim,
        ffn=int(hidden * config.intermediate_multiple_size) if width is None else width,
        norm=Norm("layer", config.layer_norm_eps),
        parallel=field(config, "use_parallel_residual", default=False),
        activation=activation(config),
        gated=False,
        scale=dim**-0.5,
        rope=rope(config),
    )


def _family(name: str, prefix: str, head: str, variants: dict[str, dict[str, Any]]) -> Family:
    def frame(config: Config) -> FrameSpec:
        return FrameSpec(
            layers=f"{name}.layers",
            embed=f"{name}.embed_in",
            head=head,
            norm=Norm("layer", config.layer_norm_eps),
            final_norm=f"{name}.final_layer_norm",
            rotary=f"{name}.rotary_emb",
        )

    return Family(
        name=name,
        layers=(f"{prefix}Layer",),
        spec=_spec,
        recipes={
            Role.ATTN_NORM: Take("input_layernorm"),
            Role.QKV: Interleaved("attention.query_key_value"),
            Role.ATTN_OUT: Take("attention.dense"),
            Role.MLP_NORM: Take("post_attention_layernorm"),
            Role.MLP_IN: Take("mlp.dense_h_to_4h"),
            Role.MLP_OUT: Take("mlp.dense_4h_to_h"),
        },
        frame=frame,
        tiny=tuple(
            Tiny(f"{prefix}ForCausalLM", f"{prefix}Config", o, label) for label, o in variants.items()
        ),
    )


_SHARED = {
    key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "intermediate_size")
}
_TINY = {**_SHARED, "intermediate_size": 96, "rotary_pct": 0.5}

FAMILIES = (
    _family(
        "gpt_neox",
        "GPTNeoX",
        "lm_head",
        {
            "": _TINY,
            "sequential": {**_TINY, "use_parallel_residual": False},
            "no bias, whole head": {**_TINY, "attention_bias": False, "rotary_pct": 1.0},
        },
    ),
    # Its last layer, and no other, has a bias in the attention's output.
    _family("gpt_neox_japanese", "GPTNeoXJapanese", "embed_out", {"": _SHARED}),
)
