"""The cache that layers extend together: transformers' own, whose keys and values are made in one call.

Shapes: B batch, K kv heads, L cached tokens, S new ones, M room of a static cache, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.ops.step import Older
from slipstream.spec import BlockSpec

__all__ = ["Kept"]


@dataclass
class Kept:
    """A cache, and what was in it before the layers that wait.

    Nothing is written to what a cache holds that grows: it gets new tensors, as by its own code, so that a
    state may be computed twice, and whoever kept the old ones has them as they were. A static cache is
    written to, as by its own code, behind what it had; a state that is computed twice writes the same.

    Attributes:
        cache: transformers' `DynamicCache` or `StaticCache`.
        batch: B.
        length: S.
        past: L, the same in all layers.
        dtype: Of keys and values.
        room: M, the same in all layers; None for a cache that grows.
        places: Of the layers in the cache.
        older: What it has of each, of a static cache with its room.
        done: How many of them have extended it.
    """

    cache: Any
    batch: int
    length: int
    past: int
    dtype: torch.dtype
    room: int | None = None
    places: list[int] = field(default_factory=list)
    older: list[Older] = field(default_factory=list)
    done: int = 0

    @classmethod
    def of(cls, cache: Any, spec: BlockSpec, index: int, x: Tensor) -> Kept | None:
        """Begin with a layer, which has yet to be accepted; None for a cache of another kind.

        Args:
            cache: What the model passed.
            spec: Of the layer.
            index: Its place in the cache.
            x: The states that enter it, `(B, S, C)`.
        """
        # What was set on the object, or said in a subclass, is somebody's own way to keep tokens.
        known = type(cache) in _kinds().caches and "update" not in vars(cache)
        found = _older(cache, index) if known and not cache.offloading and spec.causal else None
        if found is None:
            return None
        batch, length = x.shape[:2]
        if type(cache) is _kinds().caches[0]:
            return cls(cache, batch, length, 0 if found[0] is None else found[0].shape[2], x.dtype)
        past, room = _seen(cache.layers[index]), cache.layers[index].max_cache_len
        return cls(cache, batch, length, past, x.dtype, room) if past + length <= room else None

    @property
    def in_place(self) -> bool:
        """Whether keys and values are written where the older ones are."""
        return self.room is not None and self.older[0][0] is not None

    def accept(self, spec: BlockSpec, index: int) -> bool:
        """Add a layer; False where it cannot go with the others."""
        found = None if index in self.places or spec.cache_repeated else _older(self.cache, index)
        if found is None:
            return False
        if self.room is not None and not self._is_as_full(index, found):
            return False
        length = self.past if self.room is None else self.room
        shape = (self.batch, spec.kv_heads, length, spec.head_dim)
        for one in found:
            if one is None and self.past:
                return False
            if one is not None and (
                one.shape != shape or one.dtype != self.dtype or one.device.type != "cpu"
            ):
                return False
        self.places.append(index)
        self.older.append(found)
        return True

    def _is_as_full(self, index: int, found: Older) -> bool:
        """Whether a layer of a static cache has as many tokens as the others, and as much room."""
        layer = self.cache.layers[index]
        known = found[0] is None or all(t is not None and t.is_contiguous() for t in found)
        alike = not self.older or (self.older[0][0] is None) == (found[0] is None)
        return known and alike and layer.max_cache_len == self.room and _seen(layer) == self.past

    def commit(self, made: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let the cache have what the first layers made, unless it has that already.

        Args:
            made: Keys and values `(B, K, L + S, D)` of each, or those of the cache itself where they were
                written to.
        """
        if self.in_place:
            for index in self.places[self.done : len(made)]:
                static = self.cache.layers[index]
                static.cumulative_length.add_(self.length)
                if static.is_sliding:
                    static.cumulative_length_int += self.length
            self.done = max(self.done, len(made))
            return
        plain = _kinds().plain
        for index, (k, v) in list(zip(self.places, made, strict=False))[self.done :]:
            layers = self.cache.layers
            layer: Any = layers[index] if index < len(layers) else None
            if type(layer) is plain and layer.is_initialized:
                layer.keys, layer.values = k, v
            else:
                # Which windows it keeps, and what else it counts, is its own affair.
                self.cache.update(k[:, :, self.past :], v[:, :, self.past :], index)
        self.done = max(self.done, len(made))


class _Kinds(NamedTuple):
    """transformers' classes.

    Attributes:
        caches: The one that grows, and the static one.
        plain: Layers that keep all tokens.
        sliding: Those that keep a window.
        static: Both with room of a fixed size.
    """

    caches: tuple[Any, Any]
    plain: Any
    sliding: Any
    static: tuple[Any, Any]


@functools.cache
def _kinds() -> _Kinds:
    from transformers import cache_utils as known

    return _Kinds(
        (known.DynamicCache, known.StaticCache),
        known.DynamicLayer,
        known.DynamicSlidingWindowLayer,
        (known.StaticLayer, known.StaticSlidingWindowLayer),
    )


def _seen(layer: Any) -> int:
    """Tokens in a layer of a static cache (L); one whose window has passed has more than its room."""
    return int(layer.cumulative_length_int if layer.is_sliding else layer.cumulative_length)


def _older(cache: Any, index: int) -> Older | None:
    """What a cache has of a layer, `(None, None)` where that is nothing; None where only it can say."""
    kinds, layers = _kinds(), cache.layers
    if index >= len(layers):
        return (None, None) if cache.layer_class_to_replicate is kinds.plain else None
    layer = layers[index]
    own = kinds.static if type(cache) is kinds.caches[1] else (kinds.plain, kinds.sliding)
    if type(layer) not in own or "update" in vars(layer):
        return None
    if type(layer) is kinds.sliding and (layer.record_past or layer.sliding_window < 2):
        return None
    if not layer.is_initialized:
        return None, None
    k, v = layer.keys, layer.values
    if not (type(k) is type(v) is Tensor):
        return None
    if k.numel() == v.numel() == 0:
        return None, None
    return (k, v) if k.dim() == v.dim() == 4 else None
