"""Storage of keys and values in a paged cache: dense, or as int8 codes with a scale per token and kv head.

Shapes: T packed tokens, K kv heads, D head dim, P blocks (pages), Z tokens per block, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CachePart", "Caches", "Int8Cache", "LayerCache", "read_cache", "tensors_of", "write_cache"]


@dataclass(frozen=True)
class Int8Cache:
    """Keys or values as `code * scale`, in half the bytes of bfloat16.

    A row of D values has the scale `max |x| / 127`: each value is off by at most half a scale, `max |x| /
    254`.

    Attributes:
        codes: `(P, Z, K, D)` int8, contiguous, from -127 to 127; updated in place.
        scales: `(P, Z, K)` float32, contiguous; updated in place.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """`(P, Z, K, D)`."""
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the codes."""
        return self.codes.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


CachePart = Tensor | Int8Cache
"""Keys or values of one layer, `(P, Z, K, D)`."""


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of the sequences of a generation; updated in place.

    Attributes:
        k: Keys, or with latent attention latents; empty where the layer has no attention.
        v: Values, or with latent attention the keys that all heads share; likewise.
        states: `(rows, S)` float32 contiguous, the states of its recurrence; None without one.
    """

    k: CachePart
    v: CachePart
    states: Tensor | None = None

    @property
    def pages(self) -> tuple[CachePart, CachePart]:
        """Keys and values."""
        return self.k, self.v

    @property
    def parts(self) -> tuple[CachePart, ...]:
        """Keys, values and, if there are some, states."""
        return self.pages if self.states is None else (*self.pages, self.states)


Caches = Sequence[LayerCache]
"""What each layer keeps."""


def tensors_of(cache: CachePart) -> tuple[Tensor, ...]:
    """Return the tensors of keys or values; the first dimension of each is the blocks."""
    return (cache.codes, cache.scales) if isinstance(cache, Int8Cache) else (cache,)


def read_cache(cache: CachePart, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return blocks of a cache, dequantized if they are int8.

    Args:
        cache: Keys or values, `(P, Z, K, D)`.
        blocks: Block indices of any shape, int64.
        dtype: Dtype of the result.

    Returns:
        `(*blocks.shape, Z, K, D)`, a copy.
    """
    if isinstance(cache, Tensor):
        return cache[blocks].to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (cache.codes[blocks].to(wide) * cache.scales[blocks].to(wide).unsqueeze(-1)).to(dtype)


def write_cache(k: Tensor, v: Tensor, k_cache: CachePart, v_cache: CachePart, slots: Tensor) -> None:
    """Write new keys and values into their slots, in place.

    Args:
        k: `(T, K, D)`.
        v: `(T, K, D)`.
        k_cache: `(P, Z, K, D)`, contiguous; updated.
        v_cache: `(P, Z, K, D)`, contiguous; updated.
        slots: `(T,)` int64, each one distinct.
    """
    for rows, cache in ((k, k_cache), (v, v_cache)):
        if isinstance(cache, Tensor):
            cache.flatten(0, 1).index_copy_(0, slots, rows.to(cache.dtype))
            continue
        rows = rows.float()
        scales = rows.abs().amax(-1) / 127
        codes = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round()
        cache.codes.flatten(0, 1).index_copy_(0, slots, codes.to(torch.int8))
        cache.scales.flatten(0, 1).index_copy_(0, slots, scales)
