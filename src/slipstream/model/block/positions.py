"""Where the tokens of a layer's call stand, and the cosines and sines that they are turned by.

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
    """What is asked of `layer_call.LayerCall`."""

    @property
    def hidden(self) -> Tensor: ...  # noqa: D102
    @property
    def cache(self) -> Any: ...  # noqa: D102
    @property
    def rope(self) -> tuple[Tensor, Tensor] | None: ...  # noqa: D102
    @property
    def positions(self) -> Tensor | None: ...  # noqa: D102


def own_angles(rotary: Any, call: Call, layer_index: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a layer's own rotary module for a call."""
    batch, length, _ = call.hidden.shape
    cos, sin = rotary(call.hidden, positions_of(call, layer_index, padded=False).view(batch, length))
    return cos, sin


def positions_of(call: Call, layer_index: int, *, padded: bool) -> Tensor:
    """Where each packed token stands, `(B * S,)`; in the cache, padding and all, where `padded`."""
    batch, length, _ = call.hidden.shape
    positions = None if padded else call.positions
    if positions is None:
        before = 0 if call.cache is None else call.cache.get_seq_length(layer_index)
        positions = (torch.arange(length, device=call.hidden.device) + before)[None]
    return positions.expand(batch, length).reshape(-1)


def rope_table(rope: Rope, call: Call, table: Tensor | None) -> RopeTable:
    """The packed tokens' cosines and sines: of the layer's own table, or what the model passed."""
    batch, length, _ = call.hidden.shape
    if table is not None:
        positions = (
            call.positions if call.positions is not None else torch.arange(length, device=table.device)[None]
        )
        # Unlike an index, an embedding does not count negative positions from the end.
        sin, cos = F.embedding(positions, table.to(call.hidden.device)).chunk(2, dim=-1)
    elif call.rope is not None:
        cos, sin = half_tables(*call.rope, rope)
    else:
        raise AssertionError(
            "a layer that rotates was called without a table; its injected class checks for that"
        )
    if cos.dim() == 2 and cos.shape[0] < length:
        # A picture's first tokens have no place in it, and no angle; its table has no batch.
        before = (0, 0, length - cos.shape[-2], 0)
        cos, sin = F.pad(cos, before, value=1.0), F.pad(sin, before)
    cos, sin = (t.expand(batch, length, -1).reshape(batch * length, -1) for t in (cos, sin))
    return cos, sin
