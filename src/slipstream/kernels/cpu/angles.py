"""Rotary tables as the library reads them; those of a model's first positions are kept between generations.

torch computes a table of a few hundred positions on several threads. Waking these, and ending them again
before the library's own threads continue, took 36 of the 250 ms that a 135-million model needed on two cores
for its first token after a prompt of 512.

Shapes: P positions, R rotated dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.spec import Rope

__all__ = ["AngleSource", "KeptAngles", "tables_of"]

_LEAST_ROWS = 1024
"""Minimum number of positions in a table, unless the model or the generation has fewer."""


class AngleSource(Protocol):
    """The part of `model.frame.Frame` that is used here; this package cannot import it."""

    @property
    def most_angles(self) -> int | None: ...  # noqa: D102
    def angles(  # noqa: D102
        self, positions: Tensor, ropes: Sequence[Rope | None]
    ) -> dict[Rope, tuple[Tensor, Tensor]]: ...
    def angle_tables(self) -> list[Tensor]: ...  # noqa: D102
    def angle_numbers(self) -> tuple[Any, ...]: ...  # noqa: D102


@dataclass(frozen=True)
class _Made:
    """Tables `(P, R / 2)` in float32, one pair per rope, and copies of all that they were computed from."""

    ropes: tuple[Rope, ...]
    numbers: tuple[Any, ...]
    sources: list[Tensor]
    tables: list[tuple[Tensor, ...]]
    rows: int

    def holds(self, frame: AngleSource, ropes: Sequence[Rope]) -> bool:
        now = frame.angle_tables()
        return (
            self.ropes == tuple(ropes)
            and self.numbers == frame.angle_numbers()
            and len(now) == len(self.sources)
            and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(now, self.sources, strict=True))
        )


class KeptAngles:
    """The rotary tables of one model; not for models whose angles depend on the longest sequence."""

    def __init__(self) -> None:
        """Start without tables."""
        self._made: _Made | None = None

    def of(
        self, frame: AngleSource, ropes: Sequence[Rope], needed: int, longest: int
    ) -> tuple[list[tuple[Tensor, ...]], int]:
        """Return the tables of the first positions, and the number of these positions.

        Args:
            frame: Computes the tables; their sources are compared by value on every call.
            ropes: The ropes of the layers.
            needed: Minimum number of positions in the tables.
            longest: Maximum number of positions that the generation may reach.

        Returns:
            `(P, R / 2)` cosines and sines for each rope, float32, contiguous, not to be written to; and P.
        """
        made = self._made
        if made is None or made.rows < needed or not made.holds(frame, ropes):
            most = frame.most_angles or longest
            rows = max(min(max(2 * needed, _LEAST_ROWS), longest, most), needed)
            sources = [t.detach().clone() for t in frame.angle_tables()]
            tables = frame.angles(torch.arange(rows, device="cpu"), ropes)
            pairs = [tuple(t.detach().float().contiguous() for t in tables[rope]) for rope in ropes]
            made = _Made(tuple(ropes), frame.angle_numbers(), sources, pairs, rows)
            self._made = made
        return made.tables, made.rows


def tables_of(
    ropes: Sequence[Rope], tables: Mapping[Rope, tuple[Tensor, Tensor]]
) -> tuple[list[tuple[Tensor, ...]], Any]:
    """Return the rotary tables as the library reads them, and structs that point to them.

    Args:
        ropes: The ropes of an engine's layers, in the order of the structs' indices.
        tables: Cosines and sines by rope, `(rows, R / 2)`; ropes of layers that do not run may be missing.
    """
    if not tables:
        return [], None
    placeholder = next(iter(tables.values()))  # placeholder for the tables of layers that do not run
    angles = [tuple(t.float().contiguous() for t in tables.get(rope, placeholder)) for rope in ropes]
    structs = (abi.Table(cos.data_ptr(), sin.data_ptr(), *cos.shape) for cos, sin in angles)
    return angles, (abi.Table * len(angles))(*structs)
