"""Rotation of queries and keys, and the write of new keys and values to the paged cache, before attention.

Shapes: T packed tokens, H heads, K kv heads, D head dim, R rotated dims, P blocks (pages), Z tokens per
block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.ops.bind import Case, Op
from slipstream.ops.kv_cache import CachePart, Int8Cache, write_cache
from slipstream.ops.rope import rope

__all__ = ["OP", "rope_cache"]


def rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: CachePart,
    v_cache: CachePart,
    slots: Tensor,
    *,
    tables: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> Tensor:
    """Rotate queries and keys, write keys and values into their slots, and return the queries.

    Source: as in `rope` and `write_cache`.

    Args:
        q: `(T, H, D)`.
        k: `(T, K, D)`, not rotated.
        v: `(T, K, D)`.
        k_cache: `(P, Z, K, D)`; updated in place.
        v_cache: `(P, Z, K, D)`; updated in place.
        slots: `(T,)` int64, each one distinct.
        tables: Cosines and sines, `(T, R / 2)` each; None if nothing is to be rotated.
        interleaved: The two dims of a rotated pair are adjacent.

    Returns:
        `(T, H, D)`; `q` itself if nothing is rotated.
    """
    if tables is not None:
        q, k = (rope(t, *tables, interleaved=interleaved) for t in (q, k))
    write_cache(k, v, k_cache, v_cache, slots)
    return q


def _case(
    name: str,
    tokens: int,
    heads: tuple[int, int, int],
    rotated: int,
    *,
    pairs: bool = False,
    int8: bool = False,
) -> Case:
    count, kv_heads, dim = heads

    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        size, blocks = 5, tokens // 5 + 3
        # The layout of a projection's output: queries, keys and values of a token are contiguous.
        qkv = torch.randn(tokens, (count + 2 * kv_heads) * dim, generator=generator).to(dtype)
        parts = qkv.split((count * dim, kv_heads * dim, kv_heads * dim), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
        angles = 100 * torch.rand(tokens, rotated // 2, generator=generator)

        def cache() -> CachePart:
            shape = (blocks, size, kv_heads, dim)
            if int8:
                codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
                return Int8Cache(codes, torch.rand(shape[:3], generator=generator))
            return torch.randn(shape, generator=generator).to(dtype)

        return {
            "q": q,
            "k": k,
            "v": v,
            "k_cache": cache(),
            "v_cache": cache(),
            "slots": torch.randperm(blocks * size, generator=generator)[:tokens],
            "tables": (angles.cos(), angles.sin()) if rotated else None,
            "interleaved": pairs,
        }

    return Case(name, make)


OP = Op(
    "rope_cache",
    rope_cache,
    (
        _case("halves, whole head", 7, (4, 2, 32), 32),
        _case("halves, part of an odd head", 3, (6, 1, 23), 10),
        _case("pairs, heads of a prime number", 5, (7, 7, 16), 16, pairs=True),
        _case("nothing rotated", 4, (3, 3, 20), 0),
        _case("int8, halves", 6, (4, 2, 40), 40, int8=True),
        _case("int8, nothing rotated, one token", 1, (2, 1, 9), 0, int8=True),
    ),
    writes=("k_cache", "v_cache"),
)
