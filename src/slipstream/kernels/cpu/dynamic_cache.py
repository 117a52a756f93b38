"""Where layers that go on from kept keys and values write the new ones.

Shapes: B batch, K kv heads, L kept tokens, S new ones, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import address
from slipstream.ops.step import Older

__all__ = ["Extended", "extended"]


@dataclass(frozen=True)
class Extended:
    """The caches of a call, a page for each sequence.

    Attributes:
        pairs: Keys and values of each layer `(B, K, room, D)`, which are written to.
        room: Tokens of a page.
        past: Tokens that were kept.
        copied: How many of them the call copies from elsewhere first.
        caches: As the library reads them.
        held: What these point to.
    """

    pairs: list[tuple[Tensor, Tensor]]
    room: int
    past: int
    copied: int
    caches: Any
    held: list[Older]


def extended(
    blocks: Sequence[Any], x: Tensor, batch: int, older: Sequence[Older], past: int | None
) -> Extended:
    """Take what was kept of some layers, or make room for it and for what is new.

    Args:
        blocks: The layers' blocks.
        x: `(B * S, C)`, for whose dtype there is room.
        batch: B.
        older: Keys and values of each layer; see `NativeStack.extend`.
        past: Likewise.
    """
    if past is not None:
        pairs = [(k, v) for k, v in older if k is not None and v is not None]
        caches = (abi.Cache(k.data_ptr(), v.data_ptr()) for k, v in pairs)
        room, copied, held = pairs[0][0].shape[2], 0, list(older)
    else:
        past = copied = 0 if older[0][0] is None else older[0][0].shape[2]
        room, pairs = past + x.shape[0] // batch, []
        held = [(_whole(k), _whole(v)) for k, v in older]
        for block in blocks:
            shape = (batch, block.spec.kv_heads, room, block.spec.head_dim)
            pairs.append((x.new_empty(shape), x.new_empty(shape)))
        caches = (
            abi.Cache(k.data_ptr(), v.data_ptr(), None, None, address(old[0]), address(old[1]))
            for (k, v), old in zip(pairs, held, strict=True)
        )
    return Extended(pairs, room, past, copied, (abi.Cache * len(pairs))(*caches), held)


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
