"""One layer's tensors, as a filling's source has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.formats import Format
from slipstream.model.convert import applies, dtype_named
from slipstream.model.layers import Found
from slipstream.ops.linear import Weight
from slipstream.weights.recipe import Piece
from slipstream.weights.source import Source

if TYPE_CHECKING:
    from slipstream.model.weights.filling import Filling

__all__ = ["LayerSource"]


class LayerSource(Source):
    """One layer's tensors, of a filling's source."""

    def __init__(
        self, filling: Filling, found: Found, dtype: torch.dtype, keep: Sequence[re.Pattern[str]]
    ) -> None:
        """Read nothing yet."""
        self._filling, self._head, self._dtype, self._keep = filling, found.name, dtype, tuple(keep)
        self._names = [name for name, _ in found.layer.named_parameters(remove_duplicate=False)]
        floats = ((name, b) for name, b in found.layer.named_buffers() if b.is_floating_point())
        self._buffers = dict(floats)
        self._last: tuple[str, Tensor] | None = None

    def names(self) -> Iterable[str]:
        """Paths of the layer's parameters."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        full = f"{self._head}.{name}"
        if name in self._buffers and full not in self._filling.source:
            return tuple(self._buffers[name].shape)
        return self._filling.source.shape(full)

    def __contains__(self, name: str) -> bool:
        """Whether a parameter has this path, or a buffer: a router's correction, the scale of a layer."""
        return name in self._names or name in self._buffers

    def read(self, name: str) -> Tensor:
        """In the engine's dtype; a view of the source where that is its own."""
        if self._last is None or self._last[0] != name:
            full = f"{self._head}.{name}"
            if name in self._buffers and full not in self._filling.source:
                return self._buffers[name]
            tensor = self._filling.borrow(self._filling.source.read(full))
            if applies(full, tensor, self._dtype, self._keep):
                tensor = tensor.to(self._dtype)
            self._last = (name, tensor)
        return self._last[1]

    def part(
        self, name: str, rows: Sequence[range] | None, columns: range | None, experts: range | None
    ) -> Tensor | None:
        """In the engine's dtype, as the source makes it."""
        full = f"{self._head}.{name}"
        found = (
            self._filling.source.part(full, rows, columns, experts) if full in self._filling.source else None
        )
        if found is not None and applies(full, found, self._dtype, self._keep):
            found = found.to(self._dtype)
        return found

    def packed(self, name: str, wanted: Format, pieces: Sequence[Piece] = ()) -> Weight | None:
        """A role's matrix (`name` is the role), as the source has it, or joined of the pieces it has."""
        source = self._filling.source
        full = [replace(piece, name=f"{self._head}.{piece.name}") for piece in pieces]
        whole = source.packed(f"{self._head}:{name}", wanted, full)
        if whole is not None:
            return replace(whole, dtype=self._dtype_of(full))
        have = {piece.name: source.packed(piece.name, wanted) for piece in full}
        some = next((matrix for matrix in have.values() if matrix is not None), None)
        if some is None:
            return None
        runs = []
        for piece, own in zip(full, pieces, strict=True):
            matrix = have[piece.name]
            if matrix is None:
                runs.append(wanted.pack(own.of(self.read(own.name)).contiguous()))
            else:
                runs.append(_rows(piece, matrix))
        last = len(runs[0]) - 1
        planes = tuple(
            torch.cat(run, dim=-1 if place == last else -2) if len(run) > 1 else run[0].contiguous()
            for place, run in enumerate(zip(*runs, strict=True))
        )
        shape = (*planes[last].shape, some.shape[-1])
        flat = len(shape) == 2  # what enters a stack of experts is not rounded
        return Weight(
            wanted.name if flat else wanted.packed_as,
            shape,
            planes,
            wanted.unpack,
            None,
            self._dtype_of(full),
            wanted.rounding if flat else None,
        )

    def _dtype_of(self, pieces: Iterable[Piece]) -> torch.dtype:
        """What a role's matrix unpacks to: float32 where one of its pieces is kept in that."""
        dtypes = {dtype_named(piece.name, self._dtype, self._keep) for piece in pieces}
        return torch.float32 if torch.float32 in dtypes else self._dtype


def _rows(piece: Piece, matrix: Weight) -> tuple[Tensor, ...]:
    """A piece's rows of every plane of a matrix, which is in canonical orientation already."""
    *planes, factors = matrix.planes
    rows = replace(piece, transposed=False)
    return (*(rows.of(plane) for plane in planes), replace(rows, bias=True).of(factors))
