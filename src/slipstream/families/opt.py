"""OPT (and Galactica): learned positions from 2 on, norms before the branches or after the residual sums."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import QKV, TINY, plain_like
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role
from slipstream.weights.recipe import First, Take, Unit

_NORM = Norm("layer", 1e-5)


def _spec(config: Config, index: int) -> BlockSpec:
    return plain_like(
        config,
        index,
        ffn=config.ffn_dim,
        norm=_NORM,
        place="pre" if config.do_layer_norm_before else "post",
        activation=config.activation_function,
    )


def _frame(config: Config) -> FrameSpec:
    projected = config.word_embed_proj_dim != config.hidden_size
    normed = config.do_layer_norm_before and not config._remove_final_layer_norm
    return FrameSpec(
        layers="model.decoder.layers",
        embed="model.decoder.embed_tokens",
        pos_embed="model.decoder.embed_positions",
        pos_offset=2,
        project_in="model.decoder.project_in" if projected else None,
        project_out="model.decoder.project_out" if projected else None,
        head="lm_head",
        norm=_NORM,
        final_norm="model.decoder.final_layer_norm" if normed else None,
    )


_KEYS = ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")
_TINY = {key: TINY[key] for key in _KEYS} | {"ffn_dim": 96, "num_hidden_layers": 2}
_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "norm after, projected, gelu": {
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 48,
        "activation_function": "gelu",
    },
    "weightless norms, no bias": {"layer_norm_elementwise_affine": False, "enable_bias": False},
    "no final norm": {"_remove_final_layer_norm": True},
}

FAMILY = Family(
    name="opt",
    layers=("OPTDecoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: First((Take("self_attn_layer_norm"), Unit())),
        Role.QKV: QKV,
        Role.ATTN_OUT: Take("self_attn.out_proj"),
        Role.MLP_NORM: First((Take("final_layer_norm"), Unit())),
        Role.MLP_IN: Take("fc1"),
        Role.MLP_OUT: Take("fc2"),
    },
    frame=_frame,
    tiny=tuple(Tiny("OPTForCausalLM", "OPTConfig", {**_TINY, **o}, label) for label, o in _VARIANTS.items()),
)
