"""DeBERTa V2 and V3: scores also depend on the distance of query and key, and on either of them.

With distance d = i - j of query i and key j, its embedding r(d), and its projections k(r) and q(r)::

    score = (q_i . k_j + q_i . k(r(d)) + k_j . q(r(d))) / sqrt(head_dim * number of terms)

Source: He et al. 2021 (arXiv 2006.03654), eq. 4, as transformers computes it.

Shapes: B batch, H heads, S rows, D head dim, R distances: 2 S - 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.families.common import bert_like, bert_tiny, field
from slipstream.families.family import Config, Family, Heads, OwnAttention
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Stack, Take


def _spec(config: Config, index: int) -> BlockSpec:
    dim = field(config, "attention_head_size", default=config.hidden_size // config.num_attention_heads)
    scale = _scale(dim, config.pos_att_type or ())
    return bert_like(config, index, head_dim=dim, scale=scale, own_attention=True)


def _scale(dim: int, kinds: Collection[str]) -> float:
    return float((dim * (1 + ("c2p" in kinds) + ("p2c" in kinds))) ** -0.5)


def _attend(
    heads: Heads, layer: Any, given: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    own, hidden = layer.attention.self, ~given["attention_mask"].bool()
    bias = _bias(heads, own, given, q, k) if own.relative_attention else q.new_zeros(1)
    lowest = torch.finfo(q.dtype).min  # added to any score, it is itself
    return (heads.attend(q, k, v, torch.where(hidden, lowest, bias)),)


def _bias(heads: Heads, own: Any, given: Mapping[str, Any], q: Tensor, k: Tensor) -> Tensor:
    """Return what is added to the scores, `(B, H, S, S)`."""
    span, length = own.pos_ebd_size, q.shape[2]
    rows = given["rel_embeddings"][: 2 * span]
    # By distance, from 1 - S to S - 1; the original's table has an entry for each pair of tokens.
    table = given["relative_pos"].reshape(-1, length, length)[0]
    places = torch.cat((table[0].flip(0)[:-1], table[:, 0])).long() + span
    places = places.clamp(0, 2 * span - 1)
    if len(places) < len(rows):
        rows, places = rows[places], None
    queries, keys = _projected(heads, own, rows)
    scale = _scale(own.attention_head_size, own.pos_att_type)
    bias = q.new_zeros(1)
    if "c2p" in own.pos_att_type:
        keys = keys if places is None else keys[places]
        bias = bias + _skewed(q @ (keys.permute(1, 2, 0).flip(2) * scale))
    if "p2c" in own.pos_att_type:
        queries = queries if places is None else queries[places]
        bias = bias + _skewed(k @ (queries.permute(1, 2, 0) * scale)).mT
    return bias


def _projected(heads: Heads, own: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Project embeddings of distances `(N, C)` to queries and keys `(N, H, D)`."""
    if own.share_att_key:
        queries, keys, _ = heads.of(rows)
        return queries, keys
    size = (own.num_attention_heads, own.attention_head_size)
    names = {"p2c": "pos_query_proj", "c2p": "pos_key_proj"}
    made = [getattr(own, name)(rows) if kind in own.pos_att_type else rows for kind, name in names.items()]
    queries, keys = (t.unflatten(-1, size) if t is not rows else rows for t in made)
    return queries, keys


def _skewed(x: Tensor) -> Tensor:
    """Return the view `(B, H, S, S)` of products with all distances, `(B, H, S, R)`.

    Row i begins i columns further to the left, so that the column of a pair is that of its distance.
    """
    length, width = x.shape[2:]
    x = x.contiguous()
    offset = x.storage_offset() + length - 1
    return x.as_strided((*x.shape[:2], length, length), (*x.stride()[:2], width - 1, 1), offset)


def _refuse(config: Config) -> str | None:
    others = set(config.pos_att_type or ()) - {"c2p", "p2c"}
    if config.relative_attention and others:
        return f"pos_att_type has {', '.join(sorted(others))}"
    return None if isinstance(config.hidden_act, str) else "its activation is an object"


_READS = frozenset({"attention_mask", "relative_pos", "rel_embeddings"})
_BUILT = "DebertaV2Model", "DebertaV2Config"
_TINY: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}

FAMILY = Family(
    name="deberta-v2",
    layers=("DebertaV2Layer",),
    spec=_spec,
    recipes={
        Role.QKV: Stack(tuple(f"attention.self.{part}_proj" for part in ("query", "key", "value"))),
        Role.ATTN_OUT: Take("attention.output.dense"),
        Role.ATTN_NORM: Take("attention.output.LayerNorm"),
        Role.MLP_IN: Take("intermediate.dense"),
        Role.MLP_OUT: Take("output.dense"),
        Role.MLP_NORM: Take("output.LayerNorm"),
    },
    attention=OwnAttention(_attend, reads=_READS),
    refuse=_refuse,
    ignored=("attention.self.pos_key_proj.*", "attention.self.pos_query_proj.*"),
    tiny=(
        bert_tiny(*_BUILT, position_buckets=8, norm_rel_ebd="layer_norm", **_TINY),
        bert_tiny(*_BUILT, label="apart", **{**_TINY, "share_att_key": False, "max_relative_positions": 5}),
        bert_tiny(*_BUILT, label="keys alone", **{**_TINY, "pos_att_type": ["c2p"], "conv_kernel_size": 3}),
        bert_tiny(*_BUILT, label="without distances"),
    ),
)
