"""Angles of the positions that captured steps may reach, in tables: one lookup for each rope.

Asked for them, a model's own rotary module takes eight launches of a few numbers.

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
    """Tables that the rotary module of a frame made, and copies of all that it made them of."""

    def __init__(self, frame: Frame, ropes: Sequence[Rope | None], rows: int, device: torch.device) -> None:
        """Make them.

        Args:
            frame: Its angles depend on the position alone.
            ropes: Of the layers. Those that are read from a layer's own table stay there.
            rows: P.
            device: Of the steps.
        """
        asked = [rope for rope in dict.fromkeys(ropes) if rope is not None and rope.source != "buffer"]
        made = frame.angles(torch.arange(rows, device=device), asked)
        self._tables = {rope: torch.stack(made[rope], 1).contiguous() for rope in asked}
        self._frame, self._rows = frame, rows
        self._numbers, self._sources = frame.angle_numbers(), [t.clone() for t in frame.angle_tables()]

    def holds(self) -> bool:
        """Whether the model would make the same ones now; waits for the device."""
        now = self._frame.angle_tables()
        return (
            self._numbers == self._frame.angle_numbers()
            and len(now) == len(self._sources)
            and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(now, self._sources, strict=True))
        )

    def reaches(self, rows: int) -> bool:
        """Whether so many positions are in them."""
        return rows <= self._rows

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return list(self._tables.values())

    def angles(self, positions: Tensor, ropes: Sequence[Rope | None]) -> dict[Rope, RopeTable]:
        """As `Frame.angles`; positions `(T,)` int64 below P."""
        found = self._frame.angles(positions, [rope for rope in ropes if rope not in self._tables])
        for rope, table in self._tables.items():
            both = table.index_select(0, positions)
            found[rope] = (both[:, 0], both[:, 1])
        return found
