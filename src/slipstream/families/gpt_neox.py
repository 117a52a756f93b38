"""GPT-NeoX (Pythia, Dolly) and GPT-NeoX Japanese: one projection with q, k and v of each head together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.families.common import TINY, plain_like, rope
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Interleaved, Take


def _neox(config: Config, index: int) -> BlockSpec:
    return plain_like(config, index, parallel=config.use_parallel_residual, rope=rope(config))


def _japanese(config: Config, index: int) -> BlockSpec:
    width = int(config.intermediate_multiple_size * config.hidden_size)
    return plain_like(config, index, ffn=width, rope=rope(config))


def _family(
    name: str,
    prefix: str,
    spec: Callable[[Config, int], BlockSpec],
    *,
    head: str,
    variants: dict[str, dict[str, Any]],
) -> Family:
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
        spec=spec,
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
        _neox,
        head="lm_head",
        variants={
            "": _TINY,
            "sequential": {**_TINY, "use_parallel_residual": False},
            "no bias, whole head": {**_TINY, "attention_bias": False, "rotary_pct": 1.0},
        },
    ),
    # Only the last layer has a bias in the attention's output.
    _family("gpt_neox_japanese", "GPTNeoXJapanese", _japanese, head="embed_out", variants={"": _SHARED}),
)
