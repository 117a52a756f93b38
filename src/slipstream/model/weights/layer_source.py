"""The source of one layer's tensors, on top of a filling's source."""

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
    """One layer's tensors by its own names, read from a filling's source."""

    def __init__(
        self, filling: Filling, found: Found, dtype: torch.dtype, keep: Sequence[re.Pattern[str]]
    ) -> None:
        """Collect the names; nothing is read yet."""
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
        """Whether a parameter or a buffer (a router's correction, a layer's scale) has this path."""
        return name in self._names or name in self._buffers

    def read(self, name: str) -> Tensor:
        """Return a tensor in the engine's dtype; a view of the source if it is stored in that."""
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
        """Return a part of a tensor in the engine's dtype, if the source makes parts."""
        full = f"{self._head}.{name}"
        found = (
            self._filling.source.part(full, rows, columns, experts) if full in self._filling.source else None
        )
        if found is not None and applies(full, found, self._dtype, self._keep):
            found = found.to(self._dtype)
        return found

    def packed(self, name: str, wanted: Format, pieces: Sequence[Piece] = ()) -> Weight | None:
        """Return the packed matrix of a role (`name`): the source's own, or joined from packed pieces.

        Pieces that the source does not have packed are packed here; None if it has none of them packed.
        """
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
        flat = len(shape) == 2  # inputs of a stack of experts are not rounded
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
        """Dtype to which a role's matrix unpacks: float32 if any of its pieces is kept in float32."""
        dtypes = {dtype_named(piece.name, self._dtype, self._keep) for piece in pieces}
        return torch.float32 if torch.float32 in dtypes else self._dtype


def _rows(piece: Piece, matrix: Weight) -> tuple[Tensor, ...]:
    """Return a piece's rows of every plane of a matrix, whose planes are in canonical orientation already."""
    *planes, factors = matrix.planes
    rows = replace(piece, transposed=False)
    return (*(rows.of(plane) for plane in planes), replace(rows, bias=True).of(factors))
