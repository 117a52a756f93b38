"""Reads what a model's masks hide: where that is padding alone, the real tokens are packed side by side.

Shapes: B batch, S sequence, T packed tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.ops.step import Packed
from slipstream.spec import BlockSpec

__all__ = ["Rows", "pack", "real_tokens", "sees_all"]

_HIDDEN = -1.0e30
"""What is added to a score hides its key from here on; in float16 from half of its lowest number on."""


@dataclass(frozen=True)
class Rows:
    """Which tokens of a padded batch are computed, and where they lie once they are packed.

    Attributes:
        index: `(T,)` int64 places among the `B * S` tokens, or None: all of them, in order.
        packed: Of those that are computed.
    """

    index: Tensor | None
    packed: Packed


def real_tokens(
    mask: Tensor | None, spec: BlockSpec, batch: int, length: int, *, drops: bool = True
) -> Tensor | None | bool:
    """Which tokens are real, by the mask that a layer is handed.

    Args:
        mask: 4-D, bool or additive, or None.
        spec: Says what the layer sees where nothing is padded.
        batch: B.
        length: S.
        drops: Nobody reads what leaves padded positions, but for those of `_read`.

    Returns:
        `(B, S)` bool; None where all of them are; False where the mask says more than that.
    """
    if mask is None:
        # Without a mask, an encoder's layer sees all there is, its window or not.
        narrow = not spec.causal and spec.window is not None and length > spec.window // 2 + 1
        return False if narrow else None
    visible = _visible(mask, hidden=spec.mask == "hidden")
    heads, queries, keys = mask.shape[1:]
    if visible is None or heads != 1 or keys != length or queries not in (1, length):
        return False
    itself = _structure(spec, length) if spec.mask != "padding" else None
    if queries == 1:
        if itself is not None:
            return False
        real = visible[:, 0, 0]
    else:
        real = visible.diagonal(dim1=2, dim2=3)[:, 0]  # a token sees itself, unless it is padding
        expected = real[:, None, None, :]
        wrong = visible != (expected if itself is None else expected & itself)
        if drops:
            wrong &= (real | _read(real, (spec,)))[:, None, :, None]
        if bool(wrong.any()):
            return False
    if bool(real.all()):
        return None
    fits = real.any(dim=1).all() and _keeps_distances(real, spec, drops=drops)
    return real.expand(batch, length) if fits else False


def sees_all(mask: Tensor | None, spec: BlockSpec, queries: int, keys: int, room: int | None = None) -> bool:
    """Whether the last tokens of a sequence see all before them, and no other, as far as a window goes.

    Args:
        mask: 4-D, bool or additive, that a causal layer is handed upon a cache, or None.
        spec: Says what the layer sees beside.
        queries: S, new tokens.
        keys: L, with those in the cache.
        room: Of a static cache, which is not seen behind the keys; None for a cache that grows.
    """
    room = keys if room is None else room
    if mask is None:
        # A single token is not told apart from what stands behind it.
        return queries > 1 or keys == room
    visible = _visible(mask, hidden=spec.mask == "hidden")
    if visible is None or mask.shape[1] != 1 or mask.shape[2] not in (1, queries) or mask.shape[3] != room:
        return False
    if spec.mask == "padding":
        return room == keys and bool(visible.all())
    expected = torch.ones(queries, room, dtype=torch.bool, device="cpu").tril(keys - queries)
    if spec.window is not None:
        expected = expected.triu(keys - queries - spec.window + 1)
    return torch.equal(visible, expected.expand(*mask.shape[:2], queries, room))


def _visible(mask: Tensor, *, hidden: bool) -> Tensor | None:
    """The mask as bool, or None where it adds anything else than nothing and everything."""
    if mask.dtype == torch.bool:
        return ~mask if hidden else mask
    if not mask.is_floating_point():
        return None
    visible = mask == 0
    lowest = max(_HIDDEN, torch.finfo(mask.dtype).min / 2)
    return visible if bool((visible | (mask <= lowest)).all()) else None


@functools.lru_cache(maxsize=2)
def _causal(length: int, window: int | None) -> Tensor:
    seen = torch.ones(length, length, dtype=torch.bool, device="cpu").tril()
    return seen if window is None else seen.triu(1 - window)


@functools.lru_cache(maxsize=2)
def _near(length: int, reach: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device="cpu").tril(reach).triu(-reach)


def _structure(spec: BlockSpec, length: int) -> Tensor | None:
    """`(S, S)`, what each token sees where nothing is padded; None where that is everything."""
    if spec.causal:
        return _causal(length, spec.window)
    return None if spec.window is None else _near(length, spec.window // 2)


def _keeps_distances(real: Tensor, spec: BlockSpec, *, drops: bool) -> bool:
    """Whether packed tokens are as far from each other as padded ones, where that counts."""
    if not drops and spec.causal:
        return False
    if spec.window is None and spec.alibi is None and not spec.causal:
        return True
    if not drops:
        return False
    starts = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
    return bool((starts == 1).all()) and (spec.causal or bool(real[:, 0].all()))


def _read(real: Tensor, specs: Iterable[BlockSpec]) -> Tensor:
    """The places that are computed whatever is there, `(B, S)` bool.

    In an encoder the first of a row and the last, which poolers read; where distances count, only the first
    is as far from the others as it was. In a causal model what stands behind a row's first real token: it
    sees real ones, and some models read it (the end of a text, the last token); what is before sees nothing.
    """
    specs = tuple(specs)
    if any(spec.causal for spec in specs):
        return real.cumsum(1) > 0
    read = torch.zeros_like(real)
    read[:, 0] = True
    read[:, -1] |= all(spec.window is None and spec.alibi is None for spec in specs)
    return read


def pack(
    real: Tensor | None, batch: int, length: int, *, specs: Iterable[BlockSpec], drops: bool = True
) -> Rows:
    """Lay out the real tokens of a batch, and behind those of each row the padded ones that somebody reads.

    Padding sees the real tokens, as it does in the padded batch, and nobody sees it; in a causal model what
    stands before them would see nothing, and is left out.

    Args:
        real: From `real_tokens`; every row has one.
        batch: B.
        length: S.
        specs: Of the layers that the tokens run through.
        drops: Of padding, only the places of `_read` are computed.
    """
    if real is None:
        return _whole(batch, length)
    lens = real.sum(1)
    read = ~real
    if drops:
        read &= _read(real, specs)
    row, column = torch.cat([real, read], dim=1).nonzero(as_tuple=True)
    index = row * length + column % length
    counts = lens + read.sum(1)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Rows(index, Packed(starts.int(), lens.int(), index))


@functools.lru_cache(maxsize=4)
def _whole(batch: int, length: int) -> Rows:
    """All tokens of a batch; nobody writes to what is returned."""
    with torch.inference_mode(False):  # a tensor of inference mode serves no other
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device="cpu")
        lens = torch.full((batch,), length, dtype=torch.int32, device="cpu")
        return Rows(None, Packed(starts, lens, torch.arange(batch * length, device="cpu")))
