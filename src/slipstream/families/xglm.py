"""XGLM and BioGPT: scaled embeddings, and positions from 2 on in a sinusoidal or a learned table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from slipstream.families.common import QKV, field, plain_like
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Take

_NORM = Norm("layer", 1e-5)


def _xglm(config: Config, index: int) -> BlockSpec:
    return plain_like(config, index, ffn=config.ffn_dim, norm=_NORM, activation=config.activation_function)


def _biogpt(config: Config, index: int) -> BlockSpec:
    return plain_like(config, index, norm=_NORM)


def _refuse(config: Config) -> str | None:
    return "add_cross_attention is True" if field(config, "add_cross_attention", default=False) else None


def _family(
    name: str,
    prefix: str,
    spec: Callable[[Config, int], BlockSpec],
    *,
    root: str,
    head: str,
    options: dict[str, Any],
) -> Family:
    def frame(config: Config) -> FrameSpec:
        return FrameSpec(
            layers=f"{root}.layers",
            embed=f"{root}.embed_tokens",
            embed_scale=math.sqrt(config.hidden_size) if config.scale_embedding else 1.0,
            pos_embed=f"{root}.embed_positions",
            pos_offset=2,
            head=head,
            norm=_NORM,
            final_norm=f"{root}.layer_norm",
        )

    plain = {"vocab_size": 128, "max_position_embeddings": 256, **options}
    return Family(
        name=name,
        layers=(f"{prefix}DecoderLayer",),
        spec=spec,
        recipes={
            Role.ATTN_NORM: Take("self_attn_layer_norm"),
            Role.QKV: QKV,
            Role.ATTN_OUT: Take("self_attn.out_proj"),
            Role.MLP_NORM: Take("final_layer_norm"),
            Role.MLP_IN: Take("fc1"),
            Role.MLP_OUT: Take("fc2"),
        },
        frame=frame,
        refuse=_refuse,
        tiny=(
            Tiny(f"{prefix}ForCausalLM", f"{prefix}Config", plain),
            Tiny(
                f"{prefix}ForCausalLM",
                f"{prefix}Config",
                {**plain, "scale_embedding": False},
                "unscaled embedding",
            ),
        ),
    )


FAMILIES = (
    _family(
        "xglm",
        "XGLM",
        _xglm,
        root="model",
        head="lm_head",
        options={"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    ),
    _family(
        "biogpt",
        "BioGpt",
        _biogpt,
        root="biogpt",
        head="output_projection",
        options={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
)
