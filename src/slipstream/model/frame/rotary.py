"""The rotary angles of a language model, from its own rotary modules or from a table in its layers.

Shapes: T packed tokens, R rotated dims.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.block.block import RopeTable
from slipstream.ops.rope import both_tables, half_tables
from slipstream.spec import Rope

__all__ = ["Rotary"]

_FIXED = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
"""Rope types whose angles depend on the position alone."""


class Rotary:
    """Where the angles of a model's layers come from."""

    def __init__(
        self, by_type: Mapping[str | None, nn.Module], layers: nn.ModuleList, table: str | None
    ) -> None:
        """Store the sources.

        Args:
            by_type: The rotary module of each `Rope.layer_type` that has one of its own; under None that of
                all others, which may itself distinguish types of layers.
            layers: The layers.
            table: Path of a `[sin | cos]` table within a layer, where the model has no rotary module.
        """
        self._by_type, self._layers, self._table = dict(by_type), layers, table
        shared = self._by_type.get(None)
        self._takes_type = shared is not None and "layer_type" in inspect.signature(shared.forward).parameters

    def modules(self) -> Iterator[nn.Module]:
        """Iterate over the rotary modules and the modules within them."""
        for module in self._by_type.values():
            yield from module.modules()

    @property
    def most_positions(self) -> int | None:
        """Number of positions that the layers' own table covers; None where there is none."""
        return None if self._table is None else int(self._layer_table().shape[0])

    @property
    def shares_a_length(self) -> bool:
        """Whether a token's angles depend on the longest sequence of the batch (dynamic and long rope)."""
        kinds = [getattr(module, "rope_type", None) for module in self._by_type.values()]
        each = (kind.values() if isinstance(kind, dict) else [kind or "default"] for kind in kinds)
        return any(not _FIXED.issuperset(kind) for kind in each)

    def angles(self, positions: Tensor, ropes: Sequence[Rope | None]) -> dict[Rope, RopeTable]:
        """Compute angles as `Frame.angles` describes."""
        tables: dict[Rope, RopeTable] = {}
        for rope in ropes:
            if rope is None or rope in tables:
                continue
            if rope.source == "buffer":
                sin, cos = self._layer_table()[positions].chunk(2, dim=-1)
            else:
                cos, sin = both_tables(self._turned(rope, positions))
                cos, sin = half_tables(cos[0], sin[0], rope)
            tables[rope] = (cos, sin)
        return tables

    def _turned(self, rope: Rope, positions: Tensor) -> Any:
        own = self._by_type.get(rope.layer_type)
        rotary: Any = self._by_type[None] if own is None else own
        extra = {"layer_type": rope.layer_type} if own is None and self._takes_type else {}
        probe = torch.empty(1, dtype=torch.float32, device=positions.device)
        try:
            return rotary(probe, positions[None], **extra)
        except IndexError:  # some modules read positions in time, height and width, which are equal for text
            return rotary(probe, positions.expand(3, 1, -1), **extra)

    def tables(self) -> list[Tensor]:
        """Return the tensors that the angles are computed from."""
        modules = self._by_type.values()
        tensors = [t for module in modules for t in (*module.buffers(), *module.parameters())]
        return tensors if self._table is None else [*tensors, self._layer_table()]

    def numbers(self) -> tuple[tuple[str, Any], ...]:
        """Return the plain attributes of the rotary modules, on which the angles may depend."""
        plain = (item for module in self._by_type.values() for item in vars(module).items())
        return tuple((name, value) for name, value in plain if isinstance(value, int | float | str))

    def _layer_table(self) -> Tensor:
        if self._table is None:
            raise AssertionError("the family has no rope_table")
        return self._layers[0].get_buffer(self._table)
