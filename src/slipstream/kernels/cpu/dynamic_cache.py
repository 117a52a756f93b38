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
        pairs: Keys and values of each layer `(B, K, room, D)`, which are written to; with latent attention,
            latents `(B, 1, room, R)` and rotated keys `(B, 1, room, r)`, which share a tensor.
        room: Capacity of a page in tokens.
        past: Tokens that are already cached.
        copied: How many of these the call first copies from `held` into `pairs`.
        caches: The structs that describe the caches to the library.
        held: The older keys and values that `caches` points to.
        heads_first: Whether a page holds one head after another.
    """

    pairs: list[tuple[Tensor, Tensor]]
    room: int
    past: int
    copied: int
    caches: Any
    held: list[Older]
    heads_first: bool = True


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
    if blocks[0].spec.latent is not None:
        return _extended_latents(blocks, x, batch, older)
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


def _extended_latents(blocks: Sequence[Any], x: Tensor, batch: int, older: Sequence[Older]) -> Extended:
    """Put latents beside rotated keys, as the library keeps them, with room for the new ones."""
    past = 0 if older[0][0] is None else older[0][0].shape[2]
    room, pairs, caches = past + x.shape[0] // batch, [], []
    for block, parts in zip(blocks, older, strict=True):
        widths = [width for _, width in block.spec.cached]
        rows = x.new_empty(batch, 1, room, sum(widths))
        first, second = rows.split(widths, dim=-1)
        for part, known in zip((first, second), parts, strict=True):
            if known is not None:
                part[:, :, :past] = known
        pairs.append((first, second))
        caches.append(abi.Cache(rows.data_ptr(), rows.data_ptr()))
    return Extended(pairs, room, past, 0, (abi.Cache * len(caches))(*caches), [], heads_first=False)


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
