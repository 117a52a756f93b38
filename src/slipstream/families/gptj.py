"""GPT-J and CodeGen: one norm for both branches, rotary over neighbouring dims with the attention's table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import gpt_frame, gpt_like
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Role, Rope
from slipstream.weights.recipe import Interleaved, Recipe, Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    rope = Rope(config.rotary_dim or config.n_embd, interleaved=True, table="half", source="buffer")
    return gpt_like(config, index, parallel=True, rope=rope)


def _codegen(config: Config, index: int) -> BlockSpec:
    return replace(_spec(config, index), scales_mask=True)


def _frame(config: Config) -> FrameSpec:
    return gpt_frame(config, pos_embed=None)


_TINY = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 8,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _family(name: str, prefix: str, qkv: Recipe, *variants: tuple[str, dict[str, Any]]) -> Family:
    return Family(
        name=name,
        layers=(f"{prefix}Block",),
        spec=_spec,
        recipes={
            Role.ATTN_NORM: Take("ln_1"),
            Role.QKV: qkv,
            Role.ATTN_OUT: Take("attn.out_proj"),
            Role.MLP_IN: Take("mlp.fc_in"),
            Role.MLP_OUT: Take("mlp.fc_out"),
        },
        frame=_frame,
        rope_table="attn.embed_positions",
        tiny=tuple(
            Tiny(f"{prefix}ForCausalLM", f"{prefix}Config", {**_TINY, **options}, label)
            for label, options in variants
        ),
    )


FAMILIES = (
    _family(
        "gptj",
        "GPTJ",
        Stack(("attn.q_proj", "attn.k_proj", "attn.v_proj")),
        ("", {}),
        ("whole head rotated, own width", {"rotary_dim": 16, "n_inner": 80}),
    ),
    # The rows are in four groups (one per accelerator in training), each with queries, values, then keys.
    replace(
        _family(
            "codegen",
            "CodeGen",
            Interleaved("attn.qkv_proj", groups=4, order="qvk"),
            ("", {"n_head": 8, "rotary_dim": 4}),
            ("one head a group, own width", {"n_inner": 80}),
        ),
        spec=_codegen,
    ),
)
