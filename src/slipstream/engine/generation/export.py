"""The keys and values of a generation as a transformers cache.

Shapes: B batch, K kv heads, H query heads, D head dim, N tokens (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.generation.runner import Runner
from slipstream.model.block.paged_cache import PagedCache
from slipstream.ops.kv_cache import CachePart, read_cache

__all__ = ["exported"]


def exported(
    model: Any, runner: Runner, cache: PagedCache, rows: Sequence[tuple[Sequence[int], int]], seen: int
) -> Any:
    """Return the first tokens' keys and values as a transformers cache: `(B, K, N, D)`, padded with zeros.

    For families whose own cache repeats keys and values for every query head that shares them, the shape is
    `(B, H, N, D)`.

    Args:
        model: Its config shapes the cache.
        runner: Its blocks describe the layers.
        cache: What the layers keep.
        rows: For each sequence, its blocks in order and the length of its padding.
        seen: N, padding included.
    """
    from transformers import DynamicCache

    out = DynamicCache(config=model.config)
    for index, kept in enumerate(cache.layers):
        spec = runner.blocks[index].spec
        if spec.sharing == "borrows":  # transformers' cache has no such layers
            continue
        parts = [
            torch.stack([_row(part, blocks, padding, seen, runner.dtype) for blocks, padding in rows])
            for part in kept.pages
        ]
        if spec.cache_repeated:
            parts = [part.repeat_interleave(spec.heads // spec.kv_heads, dim=1) for part in parts]
        out.update(parts[0], parts[1], index)
    return out


def _row(part: CachePart, blocks: Sequence[int], padding: int, seen: int, dtype: torch.dtype) -> Tensor:
    device = part.codes.device if not isinstance(part, Tensor) else part.device
    indices = torch.tensor(blocks, device=device)
    real = read_cache(part, indices, dtype).flatten(0, 1)[: seen - padding].transpose(0, 1)
    return torch.nn.functional.pad(real, (0, 0, padding, 0))
