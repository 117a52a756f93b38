"""Rotary tables for all positions that captured steps may reach: one lookup per kind of rope.

A model's own rotary module takes eight small launches instead.

Shapes: T rows, P positions, R rotated dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.model.block.block import RopeTable
from slipstream.model.frame.frame import Frame
from slipstream.spec import Rope

__all__ = ["StaticAngles"]


class StaticAngles:
    """Tables made by a frame's rotary module, and copies of everything that they were computed from."""

    def __init__(self, frame: Frame, ropes: Sequence[Rope | None], rows: int, device: torch.device) -> None:
        """Compute the tables.

        Args:
            frame: A frame whose angles depend on the position alone.
            ropes: The layers' ropes; those that are read from a layer's own table get none here.
            rows: P.
            device: The device of the steps.
        """
        wanted = [rope for rope in dict.fromkeys(ropes) if rope is not None and rope.source != "buffer"]
        tables = frame.angles(torch.arange(rows, device=device), wanted)
        self._tables = {rope: torch.stack(tables[rope], 1).contiguous() for rope in wanted}
        self._frame, self._rows = frame, rows
        self._numbers, self._sources = frame.angle_numbers(), [t.clone() for t in frame.angle_tables()]

    def holds(self) -> bool:
        """Whether the model would compute the same tables now; waits for the device."""
        now = self._frame.angle_tables()
        return (
            self._numbers == self._frame.angle_numbers()
            and len(now) == len(self._sources)
            and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(now, self._sources, strict=True))
        )

    def reaches(self, rows: int) -> bool:
        """Whether the tables have at least `rows` positions."""
        return rows <= self._rows

    def tensors(self) -> list[Tensor]:
        """Return all tables."""
        return list(self._tables.values())

    def angles(self, positions: Tensor, ropes: Sequence[Rope | None]) -> dict[Rope, RopeTable]:
        """Return what `Frame.angles` does, for positions `(T,)` int64 below P."""
        tables = self._frame.angles(positions, [rope for rope in ropes if rope not in self._tables])
        for rope, table in self._tables.items():
            both = table.index_select(0, positions)
            tables[rope] = (both[:, 0], both[:, 1])
        return tables
