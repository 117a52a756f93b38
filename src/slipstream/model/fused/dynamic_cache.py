"""transformers' own cache, extended by several layers in one call.

Shapes: B batch, K kv heads, L cached tokens, S new tokens, M size of a static cache, D head dim.
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
    """A cache, and its contents before the deferred layers run.

    A growing cache gets new tensors, as by its own code, and the old ones are not written to: so a state can
    be computed twice, and other references to the old tensors stay valid. A static cache is written to, as by
    its own code, after its previous tokens; a state that is computed twice writes the same values.

    Attributes:
        cache: transformers' `DynamicCache` or `StaticCache`.
        batch: B.
        length: S.
        past: L, the same in all layers.
        dtype: Dtype of keys and values.
        room: M, the same in all layers; None for a growing cache.
        places: Indices of the layers in the cache.
        older: Keys and values that the cache has for each layer; of a static cache, in full size M.
        done: Number of layers that have extended the cache.
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
        """Begin with a layer's cache, before the layer is accepted; return None for unsupported caches.

        Args:
            cache: The cache that the model passed.
            spec: Spec of the layer.
            index: Its index in the cache.
            x: Hidden states that enter the layer, `(B, S, C)`.
        """
        # A subclass, or an `update` set on the object, may store tokens differently.
        known = type(cache) in _kinds().caches and "update" not in vars(cache)
        older = _older(cache, index) if known and not cache.offloading and spec.causal else None
        if older is None:
            return None
        batch, length = x.shape[:2]
        if type(cache) is _kinds().caches[0]:
            return cls(cache, batch, length, 0 if older[0] is None else older[0].shape[2], x.dtype)
        past, room = _seen(cache.layers[index]), cache.layers[index].max_cache_len
        return cls(cache, batch, length, past, x.dtype, room) if past + length <= room else None

    @property
    def in_place(self) -> bool:
        """Whether keys and values are written into the tensors that hold the older ones."""
        return self.room is not None and self.older[0][0] is not None

    def accept(self, spec: BlockSpec, index: int) -> bool:
        """Add a layer; return False if it cannot run together with the others."""
        # The library keeps latents beside their rotated keys, which are apart in a static cache.
        apart = spec.latent is not None and self.room is not None
        own = index in self.places or spec.cache_repeated or apart
        older = None if own else _older(self.cache, index)
        if older is None:
            return False
        if self.room is not None and not self._is_as_full(index, older):
            return False
        length = self.past if self.room is None else self.room
        for one, (heads, width) in zip(older, spec.cached, strict=True):
            if one is None and self.past:
                return False
            if one is not None and (
                one.shape != (self.batch, heads, length, width)
                or one.dtype != self.dtype
                or one.device.type != "cpu"
            ):
                return False
        self.places.append(index)
        self.older.append(older)
        return True

    def _is_as_full(self, index: int, found: Older) -> bool:
        """Whether a layer of a static cache has as many tokens as the others, and the same size."""
        layer = self.cache.layers[index]
        known = found[0] is None or all(t is not None and t.is_contiguous() for t in found)
        alike = not self.older or (self.older[0][0] is None) == (found[0] is None)
        return known and alike and layer.max_cache_len == self.room and _seen(layer) == self.past

    def commit(self, made: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store the keys and values of the first layers in the cache, unless they are there already.

        Args:
            made: Keys and values `(B, K, L + S, D)` of each layer, or the cache's own tensors where those
                were written to in place.
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
                # The cache itself handles windows and counters.
                self.cache.update(k[:, :, self.past :], v[:, :, self.past :], index)
        self.done = max(self.done, len(made))


class _Kinds(NamedTuple):
    """transformers' cache classes.

    Attributes:
        caches: The growing cache, and the static one.
        plain: Layer of a growing cache that keeps all tokens.
        sliding: Layer of a growing cache that keeps a window.
        static: Layers of a static cache, for all tokens and for a window.
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
    """Return the tokens seen by a layer of a static cache (L); more than its size once its window slides."""
    return int(layer.cumulative_length_int if layer.is_sliding else layer.cumulative_length)


def _older(cache: Any, index: int) -> Older | None:
    """Return a layer's cached keys and values, `(None, None)` if empty; None if its storage is unknown."""
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
