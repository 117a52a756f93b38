"""Positions of the tokens in a layer's call, and their cosines and sines.

Shapes: B batch, S sequence, T = B * S packed tokens, R rotated dims.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.model.block.block import RopeTable
from slipstream.ops.rope import half_tables
from slipstream.spec import Rope

__all__ = ["own_angles", "positions_of", "rope_table"]


class Call(Protocol):
    """The attributes of `layer_call.LayerCall` that are read here."""

    @property
    def hidden(self) -> Tensor: ...  # noqa: D102
    @property
    def cache(self) -> Any: ...  # noqa: D102
    @property
    def rope(self) -> tuple[Tensor, Tensor] | None: ...  # noqa: D102
    @property
    def positions(self) -> Tensor | None: ...  # noqa: D102


def own_angles(rotary: Any, call: Call, layer_index: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of a layer's own rotary module for a call."""
    batch, length, _ = call.hidden.shape
    cos, sin = rotary(call.hidden, positions_of(call, layer_index, padded=False).view(batch, length))
    return cos, sin


def positions_of(call: Call, layer_index: int, *, padded: bool) -> Tensor:
    """Return each packed token's position, `(B * S,)`; if `padded`, its index in the cache with padding."""
    batch, length, _ = call.hidden.shape
    positions = None if padded else call.positions
    if positions is None:
        before = 0 if call.cache is None else call.cache.get_seq_length(layer_index)
        positions = (torch.arange(length, device=call.hidden.device) + before)[None]
    return positions.expand(batch, length).reshape(-1)


def rope_table(rope: Rope, call: Call, table: Tensor | None) -> RopeTable:
    """Return the packed tokens' cosines and sines, from the layer's own table or the model's arguments."""
    batch, length, _ = call.hidden.shape
    if table is not None:
        positions = (
            call.positions if call.positions is not None else torch.arange(length, device=table.device)[None]
        )
        # Unlike indexing, an embedding lookup does not count negative positions from the end.
        sin, cos = F.embedding(positions, table.to(call.hidden.device)).chunk(2, dim=-1)
    elif call.rope is not None:
        cos, sin = half_tables(*call.rope, rope)
    else:
        raise AssertionError(
            "a layer that rotates was called without a table; its injected class checks for that"
        )
    if cos.dim() == 2 and cos.shape[0] < length:
        # An image's prefix tokens have no position in it and are not rotated; its table has no batch.
        before = (0, 0, length - cos.shape[-2], 0)
        cos, sin = F.pad(cos, before, value=1.0), F.pad(sin, before)
    cos, sin = (t.expand(batch, length, -1).reshape(batch * length, -1) for t in (cos, sin))
    return cos, sin
