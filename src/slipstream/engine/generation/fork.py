"""Rows of a generation that go on as another did: they share its full cache blocks.

A block that is full is never written again. The one that is being filled is each row's own, and so are those
that are still empty: of rows that go on as the same row did all but one copy it, into blocks of rows that
nobody follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache

__all__ = ["followed", "forked"]


def followed(
    cache: PagedCache, blocks: Sequence[Sequence[int]], sources: Sequence[int], held: Sequence[int]
) -> list[list[int]]:
    """The blocks of rows of which row i goes on as row `sources[i]` did.

    Args:
        cache: Blocks are copied in it.
        blocks: Of each row, in order.
        sources: A row for each row, with as many tokens as it has.
        held: Tokens of each row in the cache.
    """
    kept = set(sources)
    # What is being filled by rows that nobody follows.
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
    """The blocks of rows so many of which go on as each row did; the cache has room for them."""
    out: list[list[int]] = []
    copies: list[tuple[int, int]] = []
    for own, count in zip(blocks, held, strict=True):
        full, is_filling = divmod(count, BLOCK_SIZE)
        out.append(list(own))
        for _ in range(times - 1):
            more = cache.allocate(len(own) - full)
            if is_filling:
                copies.append((own[full], more[0]))
            out.append([*own[:full], *more])
    cache.copy(copies)
    return out
