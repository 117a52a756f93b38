"""Rows of a generation that continue from another row: they share its full cache blocks.

A full block is never written again, so it can be shared. The block that is being filled belongs to one row,
as do the empty ones: of several rows that continue from the same row, one keeps its partly filled block and
the others copy it, into blocks of rows from which none continues.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache

__all__ = ["followed", "forked"]


def followed(
    cache: PagedCache, blocks: Sequence[Sequence[int]], sources: Sequence[int], held: Sequence[int]
) -> list[list[int]]:
    """Return the blocks of each row, given that row i continues from row `sources[i]`.

    Args:
        cache: The cache; blocks are copied within it.
        blocks: The blocks of each row, in order.
        sources: For each row, the row to continue from, which has the same number of tokens.
        held: Number of cached tokens of each row.
    """
    kept = set(sources)
    # Partly filled blocks of rows from which none continues.
    spare = [
        blocks[row][count // BLOCK_SIZE]
        for row, count in enumerate(held)
        if row not in kept and count % BLOCK_SIZE
    ]
    taken: set[int] = set()
    copies: list[tuple[int, int]] = []
    out = []
    for row, source in enumerate(sources):
        full, is_filling = divmod(held[source], BLOCK_SIZE)
        own = list(blocks[row][full:])
        if is_filling:
            own[0] = blocks[source][full]
            if source in taken:
                own[0] = spare.pop()
                copies.append((blocks[source][full], own[0]))
            taken.add(source)
        out.append([*blocks[source][:full], *own])
    cache.copy(copies)
    return out


def forked(
    cache: PagedCache, blocks: Sequence[Sequence[int]], times: int, held: Sequence[int]
) -> list[list[int]]:
    """Return the blocks of the rows after each row is replaced by `times` copies; the cache has room."""
    out: list[list[int]] = []
    copies: list[tuple[int, int]] = []
    for own, count in zip(blocks, held, strict=True):
        full, is_filling = divmod(count, BLOCK_SIZE)
        out.append(list(own))
        for _ in range(times - 1):
            new = cache.allocate(len(own) - full)
            if is_filling:
                copies.append((own[full], new[0]))
            out.append([*own[:full], *new])
    cache.copy(copies)
    return out
