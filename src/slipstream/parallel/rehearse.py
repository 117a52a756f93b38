"""Ranks that share a layer: those of a mesh, or threads of this process that simulate them in a rehearsal.

A rehearsal needs no other process, so every rank proves its plan by itself, and no rank waits for one whose
plan failed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.parallel.collectives import all_sum, gather_last
from slipstream.parallel.mesh import Axis
from slipstream.parallel.plan import Cut

__all__ = ["Live", "Peers", "rehearse"]

T = TypeVar("T")

_PATIENCE = 60.0
"""Seconds that one thread waits for the others, which run one layer on a few tokens."""


class Peers(ABC):
    """The ranks with which a split module communicates.

    Attributes:
        rank: Place of this rank.
        size: Number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks; `x` may be overwritten, and all ranks get bitwise the same result."""

    @abstractmethod
    def parts(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        """Return the tensors of all ranks, `(..., widths[rank])`, in order."""

    def join(self, x: Tensor, cut: Cut) -> Tensor:
        """Return the whole of a tensor of which each rank has a part."""
        last = x.movedim(cut.dim, -1)
        parts = self.parts(last, cut.widths)
        return cut.along(-1).join(parts).movedim(-1, cut.dim)

    def __deepcopy__(self, memo: dict[int, object]) -> Peers:
        """Return `self`: a copy of a module communicates with the same ranks."""
        return self


class Live(Peers):
    """The ranks of a mesh."""

    def __init__(self, axis: Axis) -> None:
        """Use the ranks of one axis."""
        self.axis, self.rank, self.size = axis, axis.rank, axis.size

    def sum(self, x: Tensor) -> Tensor:
        """See `Peers.sum`."""
        return all_sum(x, self.axis)

    def parts(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        """See `Peers.parts`."""
        return list(gather_last(x, self.axis, widths).split(widths, dim=-1))


class _Table:
    """Where the threads of one rehearsal exchange their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self.slots: list[Tensor | None] = [None] * size

    def lay(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x
        self.barrier.wait()
        found = [slot for slot in self.slots if slot is not None]
        self.barrier.wait()
        return found


class _Rehearsed(Peers):
    """One of the threads of a rehearsal."""

    def __init__(self, table: _Table, rank: int, size: int) -> None:
        self.table, self.rank, self.size = table, rank, size

    def sum(self, x: Tensor) -> Tensor:
        """See `Peers.sum`.

        Raises:
            ValueError: Ranks have tensors of different shapes.
        """
        laid = self.table.lay(self.rank, x)
        if any(other.shape != x.shape for other in laid):
            raise ValueError(f"ranks would add up {[tuple(other.shape) for other in laid]}")
        total = laid[0].clone()
        for other in laid[1:]:
            total += other
        return total

    def parts(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        """See `Peers.parts`.

        Raises:
            ValueError: A rank's part has another width than planned.
        """
        laid = self.table.lay(self.rank, x)
        for other, width in zip(laid, widths, strict=True):
            if other.shape[-1] != width:
                raise ValueError(f"a rank would have {other.shape[-1]} columns instead of {width}")
        return laid


def rehearse(size: int, run: Callable[[Peers], T]) -> list[T]:
    """Run the work of each rank in a thread of its own; the threads communicate as the ranks would.

    Args:
        size: Number of ranks.
        run: The work of one rank; its argument is the ranks from that rank's view.

    Returns:
        The results of the ranks, in order.

    Raises:
        Exception: The first error that any of them raised.
    """
    table = _Table(size)

    def play(rank: int) -> T:
        done = False
        try:
            with torch.no_grad():
                answer = run(_Rehearsed(table, rank, size))
            done = True
            return answer
        finally:
            if not done:
                table.barrier.abort()

    with ThreadPoolExecutor(size) as threads:
        playing = [threads.submit(play, rank) for rank in range(size)]
    failures = [error for one in playing if (error := one.exception()) is not None]
    own = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    for error in (*own, *failures):
        raise error
    return [one.result() for one in playing]
