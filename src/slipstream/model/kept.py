"""The cache that layers extend together: transformers' own, whose keys and values are made in one call.

Shapes: B batch, K kv heads, L cached tokens, S new ones, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.ops.step import Older
from slipstream.spec import BlockSpec

__all__ = ["Kept"]


@dataclass
class Kept:
    """A cache that grows, and what was in it before the layers that wait.

    Nothing is written to what the cache holds: it gets new tensors, as by its own code, so that a state may
    be computed twice, and whoever kept the old ones has them as they were.

    Attributes:
        cache: transformers' `DynamicCache`.
        batch: B.
        past: L, the same in all layers.
        dtype: Of keys and values.
        places: Of the layers in the cache.
        older: What it has of each.
        done: How many of them have extended it.
    """

    cache: Any
    batch: int
    past: int
    dtype: torch.dtype
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
        dynamic = _kinds()[0]
        # What was set on the object, or said in a subclass, is somebody's own way to keep tokens.
        if type(cache) is not dynamic or "update" in vars(cache) or cache.offloading or not spec.causal:
            return None
        found = _older(cache, index)
        if found is None:
            return None
        return cls(cache, x.shape[0], 0 if found[0] is None else found[0].shape[2], x.dtype)

    def accept(self, spec: BlockSpec, index: int) -> bool:
        """Add a layer; False where it cannot go with the others."""
        found = None if index in self.places or spec.cache_repeated else _older(self.cache, index)
        if found is None:
            return False
        shape = (self.batch, spec.kv_heads, self.past, spec.head_dim)
        for one in found:
            if (0 if one is None else one.shape[2]) != self.past:
                return False
            if one is not None and (
                one.shape != shape or one.dtype != self.dtype or one.device.type != "cpu"
            ):
                return False
        self.places.append(index)
        self.older.append(found)
        return True

    def commit(self, made: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let the cache have what the first layers made, unless it has that already.

        Args:
            made: Keys and values `(B, K, L + S, D)` of each.
        """
        plain = _kinds()[1]
        for index, (k, v) in list(zip(self.places, made, strict=False))[self.done :]:
            layers = self.cache.layers
            layer: Any = layers[index] if index < len(layers) else None
            if type(layer) is plain and layer.is_initialized:
                layer.keys, layer.values = k, v
            else:
                # Which windows it keeps, and what else it counts, is its own affair.
                self.cache.update(k[:, :, self.past :], v[:, :, self.past :], index)
        self.done = max(self.done, len(made))


@functools.cache
def _kinds() -> tuple[Any, Any, Any]:
    """The cache, and its layers that keep all tokens, or those of a window."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    return DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


def _older(cache: Any, index: int) -> Older | None:
    """What a cache has of a layer, `(None, None)` where that is nothing; None where only it can say."""
    _, plain, sliding = _kinds()
    layers = cache.layers
    if index >= len(layers):
        return (None, None) if cache.layer_class_to_replicate is plain else None
    layer = layers[index]
    if type(layer) not in (plain, sliding) or "update" in vars(layer):
        return None
    if type(layer) is sliding and (layer.record_past or layer.sliding_window < 2):
        return None
    if not layer.is_initialized:
        return None, None
    k, v = layer.keys, layer.values
    if not (type(k) is type(v) is Tensor):
        return None
    if k.numel() == v.numel() == 0:
        return None, None
    return (k, v) if k.dim() == v.dim() == 4 else None
