"""Interprets a model's masks: where they hide nothing but padding, the real tokens are packed side by side.

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
"""Additive masks hide a key from this value down; in float16, from half of its lowest number down."""


@dataclass(frozen=True)
class Rows:
    """The tokens of a padded batch that are computed, and their packed layout.

    Attributes:
        index: `(T,)` int64 indices into the `B * S` tokens; None for all of them, in order.
        packed: Layout of the computed tokens.
    """

    index: Tensor | None
    packed: Packed


def real_tokens(
    mask: Tensor | None,
    spec: BlockSpec,
    batch: int,
    length: int,
    *,
    drops: bool = True,
    biased: bool = False,
) -> Tensor | None | bool:
    """Determine from a layer's mask which tokens are real.

    Args:
        mask: 4-D, bool or additive, or None.
        spec: Determines what the layer sees without padding.
        batch: B.
        length: S.
        drops: The output at padded positions is not read, except at those of `_read`.
        biased: The call adds a bias by distance to the scores.

    Returns:
        `(B, S)` bool; None where all tokens are real; False where the mask hides anything but padding.
    """
    if spec.chunk is not None and length > spec.chunk:
        return False
    if mask is None:
        # Without a mask, an encoder's layer sees all tokens, regardless of its window.
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
            wrong &= (real | _read(real, (spec,), biased))[:, None, :, None]
        if bool(wrong.any()):
            return False
    if bool(real.all()):
        return None
    fits = real.any(dim=1).all() and _keeps_distances(real, spec, drops=drops, biased=biased)
    return real.expand(batch, length) if fits else False


def sees_all(mask: Tensor | None, spec: BlockSpec, queries: int, keys: int, room: int | None = None) -> bool:
    """Whether each of the last tokens of a sequence sees exactly the tokens up to itself, within the window.

    Args:
        mask: 4-D mask (bool or additive) of a causal layer with a cache, or None.
        spec: Determines what else the layer hides, such as its window.
        queries: S, number of new tokens.
        keys: L, number of tokens including the cached ones.
        room: Size of a static cache, whose slots after the keys must be hidden; None for a growing cache.
    """
    if spec.chunk is not None and keys > spec.chunk:
        return False
    room = keys if room is None else room
    if mask is None:
        # Without a mask, a single token would also see the unused slots after it.
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
    """Return the mask as bool (true: visible), or None if it adds anything but zero or hiding values."""
    if mask.dtype == torch.bool:
        return ~mask if hidden else mask
    if not mask.is_floating_point():
        return None
    visible = mask == 0
    lowest = max(_HIDDEN, torch.finfo(mask.dtype).min / 2)
    return visible if bool((visible | (mask <= lowest)).all()) else None


_LONGEST_KEPT = 2048
"""Tokens up to which a matrix of what sees what is kept between calls: 4 MiB each, 256 MiB at 16,384."""


def _causal(length: int, window: int | None) -> Tensor:
    make = _kept_band if length <= _LONGEST_KEPT else _band
    return make(length, None if window is None else window - 1, 0)


def _near(length: int, reach: int) -> Tensor:
    return (_kept_band if length <= _LONGEST_KEPT else _band)(length, reach, reach)


def _band(length: int, before: int | None, after: int) -> Tensor:
    """Which tokens a token sees, `(S, S)` bool: up to `before` earlier and `after` later ones."""
    seen = torch.ones(length, length, dtype=torch.bool, device="cpu").tril(after)
    return seen if before is None else seen.triu(-before)


_kept_band = functools.lru_cache(maxsize=4)(_band)


def _structure(spec: BlockSpec, length: int) -> Tensor | None:
    """Return what each token sees without padding, `(S, S)` bool; None for everything."""
    if spec.causal:
        return _causal(length, spec.window)
    return None if spec.window is None else _near(length, spec.window // 2)


def _keeps_distances(real: Tensor, spec: BlockSpec, *, drops: bool, biased: bool) -> bool:
    """Whether packing preserves the distances between tokens, if the layer depends on them."""
    if not drops and spec.causal:
        return False
    if spec.window is None and spec.alibi is None and not spec.causal and not biased:
        return True
    if not drops:
        return False
    starts = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
    return bool((starts == 1).all()) and (spec.causal or bool(real[:, 0].all()))


def _read(real: Tensor, specs: Iterable[BlockSpec], biased: bool) -> Tensor:
    """Return the positions that are computed even if they are padding, `(B, S)` bool.

    In an encoder, they are the first and the last of a row, which poolers read; where distances matter, only
    the first, whose distance to the other tokens does not change. In a causal model, they are all positions
    after a row's first real token: these see real tokens, and some models read them (the end of a text, the
    last token); earlier positions see nothing.
    """
    specs = tuple(specs)
    if any(spec.causal for spec in specs):
        return real.cumsum(1) > 0
    read = torch.zeros_like(real)
    read[:, 0] = True
    read[:, -1] |= not biased and all(spec.window is None and spec.alibi is None for spec in specs)
    return read


def pack(
    real: Tensor | None,
    batch: int,
    length: int,
    *,
    specs: Iterable[BlockSpec],
    drops: bool = True,
    biased: bool = False,
) -> Rows:
    """Pack the real tokens of each row, followed by the padded positions of the row that are read.

    Padding sees the real tokens, as it does in the padded batch, but no token sees padding; in a causal model
    padding before the real tokens would see nothing, and is left out.

    Args:
        real: From `real_tokens`; every row has a real token.
        batch: B.
        length: S.
        specs: Specs of the layers that the tokens run through.
        drops: Compute only the padded positions of `_read`.
        biased: A bias by distance is added to the scores.
    """
    if real is None:
        return _whole(batch, length)
    lens = real.sum(1)
    read = ~real
    if drops:
        read &= _read(real, specs, biased)
    row, column = torch.cat([real, read], dim=1).nonzero(as_tuple=True)
    index = row * length + column % length
    counts = lens + read.sum(1)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Rows(index, Packed(starts.int(), lens.int(), index))


@functools.lru_cache(maxsize=4)
def _whole(batch: int, length: int) -> Rows:
    """Return the layout of all tokens of a batch; it is cached, so it must not be written to."""
    with torch.inference_mode(False):  # inference tensors could not be used outside inference mode
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device="cpu")
        lens = torch.full((batch,), length, dtype=torch.int32, device="cpu")
        return Rows(None, Packed(starts, lens, torch.arange(batch * length, device="cpu")))
