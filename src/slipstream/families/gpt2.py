"""GPT-2 with its matrices stored `(in, out)`, and GPT-BigCode (StarCoder): one key head for all queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.families.common import gpt_frame, gpt_like
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Conv1D, Interleaved, Recipe, Take


def _gpt2(config: Config, index: int) -> BlockSpec:
    scale = _scale(config)
    return gpt_like(
        config,
        index,
        scale=scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale,
        cross=config.n_embd if config.add_cross_attention else None,
    )


def _bigcode(config: Config, index: int) -> BlockSpec:
    return gpt_like(config, index, kv_heads=1 if config.multi_query else config.n_head, scale=_scale(config))


def _scale(config: Config) -> float:
    return float((config.n_embd // config.n_head) ** -0.5) if config.scale_attn_weights else 1.0


def _refuse(config: Config) -> str | None:
    return "add_cross_attention is True" if config.add_cross_attention else None


def _recipes(qkv: Recipe, matrix: Callable[[str], Recipe]) -> dict[Role, Recipe]:
    return {
        Role.ATTN_NORM: Take("ln_1"),
        Role.QKV: qkv,
        Role.ATTN_OUT: matrix("attn.c_proj"),
        Role.MLP_NORM: Take("ln_2"),
        Role.MLP_IN: matrix("mlp.c_fc"),
        Role.MLP_OUT: matrix("mlp.c_proj"),
    }


_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tiny(model: str, config: str, label: str = "", **options: Any) -> Tiny:
    return Tiny(model, config, {**_TINY, **options}, label)


FAMILIES = (
    Family(
        name="gpt2",
        layers=("GPT2Block",),
        spec=_gpt2,
        recipes={
            **_recipes(Conv1D("attn.c_attn"), Conv1D),
            Role.CROSS_NORM: Take("ln_cross_attn"),
            Role.CROSS_Q: Conv1D("crossattention.q_attn"),
            Role.CROSS_KV: Conv1D("crossattention.c_attn"),
            Role.CROSS_OUT: Conv1D("crossattention.c_proj"),
        },
        frame=gpt_frame,
        tiny=(
            _tiny("GPT2LMHeadModel", "GPT2Config"),
            _tiny(
                "GPT2LMHeadModel",
                "GPT2Config",
                "scale by layer",
                scale_attn_by_inverse_layer_idx=True,
                n_inner=80,
            ),
        ),
    ),
    Family(
        name="gpt_bigcode",
        layers=("GPTBigCodeBlock",),
        spec=_bigcode,
        recipes=_recipes(Interleaved("attn.c_attn"), Take),
        frame=gpt_frame,
        refuse=_refuse,
        tiny=(
            _tiny("GPTBigCodeForCausalLM", "GPTBigCodeConfig"),
            _tiny("GPTBigCodeForCausalLM", "GPTBigCodeConfig", "many keys", multi_query=False, n_inner=80),
            _tiny("GPTBigCodeForCausalLM", "GPTBigCodeConfig", "unscaled", scale_attn_weights=False),
        ),
    ),
)
