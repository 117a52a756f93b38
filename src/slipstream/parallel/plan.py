"""How a tensor is cut along one dim for several ranks, and joined again.

Shapes: H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slipstream.parallel.shard import deal_heads, levelled, spread

__all__ = ["Cut", "Heads", "Runs", "even", "halves", "take"]

Runs = tuple[range, ...]
"""Ranges of indices along a dim, in order."""


def take(tensor: Tensor, dim: int, runs: Runs) -> Tensor:
    """Return the given runs along a dim; a view where there is one run."""
    parts = [tensor.narrow(dim, run.start, len(run)) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that each rank holds, along one dim.

    Attributes:
        dim: The dim that is cut.
        runs: The runs of each rank; several ranks may hold the same ones.
    """

    dim: int
    runs: tuple[Runs, ...]

    def of(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a whole tensor; a view where it is one run."""
        return take(tensor, self.dim, self.runs[rank])

    @property
    def widths(self) -> list[int]:
        """Length of each rank's part."""
        return [sum(map(len, runs)) for runs in self.runs]

    @property
    def overlaps(self) -> bool:
        """Whether any index is held by several ranks."""
        places = [place for runs in self.runs for run in runs for place in run]
        return len(set(places)) < len(places)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, joined from the parts of all ranks: the inverse of `of`."""
        total = max(run.stop for runs in self.runs for run in runs)
        shape = list(parts[0].shape)
        shape[self.dim] = total
        whole = parts[0].new_empty(shape)
        for part, runs in zip(parts, self.runs, strict=True):
            start = 0
            for run in runs:
                whole.narrow(self.dim, run.start, len(run)).copy_(part.narrow(self.dim, start, len(run)))
                start += len(run)
        return whole

    def along(self, dim: int) -> Cut:
        """Return a cut with the same runs along another dim."""
        return Cut(dim, self.runs)


def even(
    total: int, parts: int, unit: int, grain: int = 1, *, held: Sequence[float] = ()
) -> tuple[Runs, ...]:
    """Divide rows or inputs among ranks as evenly as possible.

    Args:
        total: Number of rows or inputs.
        parts: Number of ranks.
        unit: Runs are cut at multiples of this, if there is at least one for each rank.
        grain: Runs are cut at multiples of this instead, if no rank then gets over 1.1 times its share.
        held: What each rank holds already, as multiples of `total`; the runs compensate for it.
    """
    if held and max(held) > min(held):
        of_unit = unit if total >= unit * parts else 1
        return tuple((run,) for run in levelled(total, [total * own for own in held], of_unit))
    runs = spread(total, parts, grain if total >= grain * parts else 1)
    if total < grain * parts or 10 * len(runs[0]) * parts > 11 * total:
        runs = spread(total, parts, unit if total >= unit * parts else 1)
    return tuple((run,) for run in runs)


def halves(runs: Sequence[Runs], width: int, layout: Literal["stacked", "paired"]) -> tuple[Runs, ...]:
    """Rows of gate and up for runs of units, in `[gate | up]` ("stacked") or `gate, up, ...` ("paired")."""
    if layout == "paired":
        return tuple(tuple(range(2 * run.start, 2 * run.stop) for run in own) for own in runs)
    return tuple((*own, *(range(run.start + width, run.stop + width) for run in own)) for own in runs)


@dataclass(frozen=True)
class Heads:
    """Attention heads that are dealt out to ranks; query heads stay with their kv heads.

    Attributes:
        heads: H.
        kv_heads: K, which divides H.
        size: Number of ranks, at most H.
        turn: Rotation of the places to which heads are dealt (`Turns`).
    """

    heads: int
    kv_heads: int
    size: int
    turn: int = 0

    def own(self, rank: int) -> tuple[range, range]:
        """Return a rank's query heads and kv heads."""
        place = (rank + self.turn) % self.size
        queries, keys, _ = deal_heads(self.heads, self.kv_heads, self.size, place)
        return queries, keys

    def queries(self, dim: int) -> tuple[Runs, ...]:
        """Each rank's rows of a matrix with `dim` rows per query head."""
        return tuple((_rows(self.own(rank)[0], dim, 0),) for rank in range(self.size))

    def keys(self, dim: int) -> tuple[Runs, ...]:
        """Each rank's rows of a matrix with `dim` rows per kv head."""
        return tuple((_rows(self.own(rank)[1], dim, 0),) for rank in range(self.size))

    def fused(self, dim: int, layout: Literal["stacked", "grouped"]) -> tuple[Runs, ...]:
        """Each rank's rows of a matrix that holds queries, keys and values.

        Args:
            dim: D.
            layout: "stacked" is `[q | k | v]`, "grouped" has for each kv head its queries, its key and its
                value.
        """
        made = []
        per_key = self.heads // self.kv_heads
        for rank in range(self.size):
            queries, keys = self.own(rank)
            if layout == "stacked":
                at = [0, self.heads * dim, (self.heads + self.kv_heads) * dim]
                own = [_rows(queries, dim, at[0]), _rows(keys, dim, at[1]), _rows(keys, dim, at[2])]
            else:
                own = []
                for key in keys:
                    first = key * (per_key + 2) - key * per_key  # heads of k and v before its first query
                    mine = range(max(queries.start, key * per_key), min(queries.stop, (key + 1) * per_key))
                    own.append(_rows(mine, dim, first * dim))
                    own.append(_rows(range(2), dim, (key * (per_key + 2) + per_key) * dim))
            made.append(tuple(own))
        return tuple(made)

    def pairs(self, dim: int, layout: Literal["stacked", "grouped"]) -> tuple[Runs, ...]:
        """Each rank's rows of a matrix that holds keys and values: `[k | v]`, or k and v head by head."""
        if layout == "grouped":
            return self.keys(2 * dim)
        return halves(self.keys(dim), self.kv_heads * dim, "stacked")


def _rows(run: range, dim: int, offset: int) -> range:
    return range(run.start * dim + offset, run.stop * dim + offset)
