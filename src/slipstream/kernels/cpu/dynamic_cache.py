"""Caches for layers that continue from cached keys and values: where they write the new ones.

Shapes: B batch, K kv heads, L cached tokens, S new ones, D head dim.
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
    """The caches of a call, with one page per sequence.

    Attributes:
        pairs: Keys and values of each layer `(B, K, room, D)`, which are written to.
        room: Capacity of a page in tokens.
        past: Tokens that are already cached.
        copied: How many of these the call first copies from `held` into `pairs`.
        caches: The structs that describe the caches to the library.
        held: The older keys and values that `caches` points to.
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
    """Use the cached keys and values in place, or allocate room for them and the new ones.

    Args:
        blocks: The layers' blocks.
        x: `(B * S, C)`; new caches have its dtype.
        batch: B.
        older: Keys and values of each layer; see `NativeStack.extend`.
        past: Tokens filled in `older`, to be extended in place; None to allocate; see `NativeStack.extend`.
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
