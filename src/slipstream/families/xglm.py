"""XGLM and BioGPT: scaled embeddings and positions from 2 on, out of a sinusoidal table or a learned one."""

from __future__ import annotations

import math
from typing import Any

from slipstream.families.common import QKV, activation, field
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import Take

_NORM = Norm("layer", 1e-5)


def _spec(config: Config, index: int) -> BlockSpec:
    dim = config.hidden_size // config.num_attention_heads
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=dim,
        ffn=field(config, "ffn_dim", "intermediate_size"),
        norm=_NORM,
        activation=activation(config),
        gated=False,
        scale=dim**-0.5,
    )


def _refuse(config: Config) -> str | None:
    return "cross attention" if field(config, "add_cross_attention", default=False) else None


def _family(name: str, prefix: str, *, root: str, head: str, options: dict[str, Any]) -> Family:
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
        spec=_spec,
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
        root="model",
        head="lm_head",
        options={"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    ),
    _family(
        "biogpt",
        "BioGpt",
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
