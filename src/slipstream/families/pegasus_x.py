"""PEGASUS-X: an encoder whose blocks attend to themselves and to global tokens, and Pegasus's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.families.bart import BART_RECIPES, BART_TINY, bart_decoder, bart_encoder
from slipstream.families.family import Branches, Config, Family, OwnCourse, Tiny
from slipstream.spec import BlockSpec, Role

_GLOBAL = "blocks beside global tokens"
Heads = tuple[Tensor, Tensor, Tensor]


def _encoder(config: Config, index: int) -> BlockSpec:
    return replace(bart_encoder(config, "pre"), course=_GLOBAL, clamp=None)


def _decoder(config: Config, index: int) -> BlockSpec:
    return bart_decoder(config, "pre")


def _run(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    every, mask = given["global_hidden_states"], given["attention_mask"]
    rows = heads.norm(Role.ATTN_NORM, x)
    half = layer.block_size // 2 if layer.stagger_blocks_this_layer else 0
    if half:
        rows, mask = layer.pad_local_tokens(rows, mask, layer.block_size)
    own, shared = (_by_head(heads, part) for part in (rows, layer.global_self_attn_layer_norm(every)))
    seen = _blocks(heads, own, shared, mask, layer.block_size)
    x = x + heads.linear(Role.ATTN_OUT, seen)[:, half : half + x.shape[1]]
    every = every + heads.linear(Role.ATTN_OUT, _of_all(heads, own, shared, mask))
    fed = [part + heads.feed(heads.norm(Role.MLP_NORM, part)) for part in (x, every)]
    return fed[0], fed[1]


def _by_head(heads: Branches, rows: Tensor) -> Heads:
    """Project rows to queries, keys and values `(B, H, S, D)`."""
    parts = heads.linear(Role.QKV, rows).unflatten(-1, (3, heads.spec.heads, -1)).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    return q, k, v


def _blocks(heads: Branches, own: Heads, shared: Heads, mask: Tensor, size: int) -> Tensor:
    """Attend from rows to their block and the global tokens; returns `(B, S, C)`."""
    count = own[0].shape[2] // size

    def cut(rows: Tensor) -> Tensor:
        blocks: Tensor = rows.unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1)
        return blocks

    def joined(rows: Tensor, globals_: Tensor) -> Tensor:
        return torch.cat((globals_.repeat_interleave(count, dim=0), cut(rows)), dim=2)

    k, v = (joined(*pair) for pair in zip(own[1:], shared[1:], strict=True))
    visible = _beside(shared, mask.unflatten(1, (count, size)).flatten(0, 1))
    out: Tensor = heads.heed(cut(own[0]), k, v, visible).unflatten(0, (-1, count)).flatten(1, 2)
    return out


def _of_all(heads: Branches, own: Heads, shared: Heads, mask: Tensor) -> Tensor:
    """Attend from global tokens to each other and to every row; returns `(B, G, C)`."""
    k, v = (torch.cat(pair, dim=2) for pair in zip(shared[1:], own[1:], strict=True))
    return heads.heed(shared[0], k, v, _beside(shared, mask))


def _beside(shared: Heads, mask: Tensor) -> Tensor:
    """Prepend the global tokens, which are always visible, to a mask `(N, S)`: `(N, 1, 1, G + S)`."""
    return torch.constant_pad_nd(mask, (shared[1].shape[2], 0))[:, None, None]


def _tiny(label: str = "", **options: Any) -> Tiny:
    sizes = {"block_size": 4, "num_global_tokens": 3, "encoder_layers": 3}
    own = {**BART_TINY, **sizes, **options}
    return Tiny("PegasusXForConditionalGeneration", "PegasusXConfig", own, label)


FAMILY = Family(
    name="pegasus_x",
    layers=("PegasusXEncoderLayer", "PegasusXDecoderLayer"),
    spec=_encoder,
    specs={"PegasusXDecoderLayer": _decoder},
    recipes=BART_RECIPES,
    courses={
        _GLOBAL: OwnCourse(
            _run,
            ("global_self_attn_layer_norm",),
            frozenset({"global_hidden_states", "attention_mask"}),
            needs=frozenset({"global_hidden_states", "attention_mask"}),
        )
    },
    tiny=(
        _tiny(),
        _tiny("blocks that do not divide", block_size=8, stagger_local_blocks=False, scale_embedding=True),
    ),
)
