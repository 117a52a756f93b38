"""What the layers keep of a generation as a transformers cache.

Shapes: B batch, K kv heads, H query heads, D head dim, N tokens (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.generation.multimodal import Kept, last_tokens
from slipstream.engine.generation.runner import Runner
from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache, slots_of
from slipstream.model.fused.states import keeps_state, write_state
from slipstream.ops.kv_cache import CachePart, read_cache, write_cache

__all__ = ["Rows", "append_to", "exported", "store", "why_not_exported"]


Rows = Sequence[tuple[Sequence[int], int]]
"""For each sequence, its blocks in order and the length of its padding."""


def why_not_exported(model: Any, runner: Runner) -> str | None:
    """Return why a cache of transformers cannot have what the layers keep, or None if it can.

    Args:
        model: As of `exported`.
        runner: As of `exported`.
    """
    from transformers import DynamicCache

    pairs = zip(runner.frame.layers, runner.blocks, strict=False)  # it may have other layers now
    recurring = [layer for layer, block in pairs if block.spec.recurrence is not None]
    if not recurring:
        return None
    fresh = DynamicCache(config=model.config)
    known = all(keeps_state(layer, fresh) for layer in recurring)
    return None if known else "it is not known how transformers' cache has the states that some layers keep"


def exported(model: Any, runner: Runner, cache: PagedCache, rows: Rows, seen: int) -> Any:
    """Return the first tokens' keys and values as a transformers cache: `(B, K, N, D)`, padded with zeros.

    For families whose own cache repeats keys and values for every query head that shares them, the shape is
    `(B, H, N, D)`.

    Args:
        model: Its config shapes the cache.
        runner: Its blocks describe the layers.
        cache: What the layers keep.
        rows: The sequences.
        seen: N, padding included.
    """
    from transformers import DynamicCache

    out = DynamicCache(config=model.config)
    append_to(out, runner, cache, rows, 0, seen)
    return out


def append_to(out: Any, runner: Runner, cache: PagedCache, rows: Rows, first: int, seen: int) -> None:
    """Append keys and values of tokens `first` to `seen`, padding included, and replace states.

    Args:
        out: A cache of transformers that has the tokens before `first`; updated in place.
        runner: As of `exported`.
        cache: As of `exported`.
        rows: As of `exported`.
        first: Index of the first token.
        seen: Index after the last token.
    """
    for index, kept in enumerate(cache.layers):
        spec = runner.blocks[index].spec
        if kept.states is not None:
            write_state(runner.frame.layers[index], out, kept.states[: len(rows)])
        if spec.sharing == "borrows" or not spec.cached:  # transformers' cache has no keys of such layers
            continue
        parts = [
            torch.stack([_row(part, *row, first, seen, runner.dtype) for row in rows]) for part in kept.pages
        ]
        if spec.cache_repeated:
            parts = [part.repeat_interleave(spec.heads // spec.kv_heads, dim=1) for part in parts]
        out.update(parts[0], parts[1], index)


def store(layers: Sequence[Kept], cache: PagedCache, row: int, blocks: Sequence[int], count: int) -> None:
    """Store what layers of transformers' cache keep of a sequence.

    Args:
        layers: What they keep of each row.
        cache: Updated in place.
        row: The sequence's row.
        blocks: Its blocks in `cache`, in order.
        count: Number of tokens, without padding.
    """
    for made, kept in zip(layers, cache.layers, strict=True) if count else ():
        if made.states is not None and kept.states is not None:
            kept.states[row] = made.states[row]
        if made.pages is not None:
            k, v = (last_tokens(part[row], count) for part in made.pages)
            write_cache(k, v, *kept.pages, slots_of(blocks, count, k.device))


def _row(
    part: CachePart, blocks: Sequence[int], padding: int, first: int, seen: int, dtype: torch.dtype
) -> Tensor:
    """Return one row's keys or values of tokens `first` to `seen`, `(K, seen - first, D)`."""
    device = part.codes.device if not isinstance(part, Tensor) else part.device
    start, stop = max(first - padding, 0), seen - padding  # without padding
    skipped = start // BLOCK_SIZE
    indices = torch.tensor(blocks[skipped : -(-stop // BLOCK_SIZE)], device=device)
    there = read_cache(part, indices, dtype).flatten(0, 1)
    real = there[start - skipped * BLOCK_SIZE : stop - skipped * BLOCK_SIZE].transpose(0, 1)
    return torch.nn.functional.pad(real, (0, 0, seen - first - real.shape[1], 0))
