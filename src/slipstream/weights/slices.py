"""Joins the slices that tensor-parallel ranks wrote into whole tensors, when they are read.

The axis of a slice is found by shape: the one along which the slices add up to the model's tensor; a tensor
that every rank has whole is taken from the first. In a matrix that stacks several (q, k and v; gate and up),
each slice may have its own share of every part. Where the checkpoint states a Megatron version, that decides
how q, k and v are fused in a slice of n heads of d rows, which are brought to the model's order:

    0     (3, n, d)    all q, all k, all v
    1.0   (n, d, 3)
    2.0   (n, 3, d)    each head's q, k and v

Source: Megatron-LM, `fix_query_key_value_ordering`; DeepSpeed, `runtime/state_dict_factory.py`,
`merge_query_key_value`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import WeightError
from slipstream.weights.source import Source

__all__ = ["Fused", "Merged"]


@dataclass(frozen=True)
class Fused:
    """Row layout of a tensor of the model that stacks several matrices.

    Attributes:
        parts: Number of rows of each part, in order: q, k, v, or gate, up.
        heads: Number of heads, where the parts are q, k and v with equally many heads; 0 elsewhere.
        together: The rows of q, k and v of each head are adjacent, so that slices are runs of rows.
        axis: Axis of the rows.
    """

    parts: tuple[int, ...]
    heads: int
    together: bool
    axis: int = 0


class Merged(Source):
    """The whole tensors, joined from several ranks' slices."""

    def __init__(
        self,
        ranks: Sequence[Source],
        shapes: Mapping[str, tuple[int, ...]],
        fused: Mapping[str, Fused],
        *,
        version: float | None,
    ) -> None:
        """Find every tensor's axis; no values are read.

        Args:
            ranks: Sources of the ranks, in order; all must have the same names.
            shapes: Shapes of the model's tensors by the ranks' names; tensors not listed must be whole.
            fused: The model's tensors that stack several matrices.
            version: Version of Megatron's layout; None for the model's own layout.

        Raises:
            WeightError: A rank lacks a name, or slices do not add up to the model's shape.
        """
        self._ranks, self._fused, self._version = tuple(ranks), dict(fused), version
        self._axes: dict[str, int | None] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name in ranks[0].names():
            lacking = next((rank for rank in ranks if name not in rank), None)
            if lacking is not None:
                raise WeightError(f"{ranks[0].place(name)} is not in the files of every rank")
            parts = [rank.shape(name) for rank in ranks]
            self._axes[name] = axis = _axis(parts, shapes.get(name), ranks[0].place(name))
            shape = list(parts[0])
            if axis is not None:
                shape[axis] = sum(part[axis] for part in parts)
            self._shapes[name] = tuple(shape)
        for rank in ranks[1:]:
            over = next((name for name in rank.names() if name not in self._axes), None)
            if over is not None:
                raise WeightError(f"{rank.place(over)} is not in the files of every rank")

    def names(self) -> Iterable[str]:
        """Every tensor's name."""
        return self._axes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Return the whole tensor; a new one where it was split."""
        axis = self._axes[name]
        if axis is None:
            return self._ranks[0].read(name)
        parts = [rank.read(name) for rank in self._ranks]
        fused = self._fused.get(name)
        if fused is None or fused.axis != axis:
            return torch.cat(parts, dim=axis)
        if self._version is not None and fused.heads:
            return _ordered(parts, fused, self._version, self.place(name))
        if fused.together:
            return torch.cat(parts, dim=axis)
        return _stacked(parts, fused, self.place(name))

    def views(self, name: str) -> Sequence[Tensor]:
        """Views of every rank's slice."""
        return [view for rank in self._ranks for view in rank.views(name)]

    def release(self, names: Iterable[str]) -> None:
        """Let every rank's source release the tensors' memory."""
        for name in names:
            for rank in self._ranks:
                rank.release([name])

    def place(self, name: str) -> str:
        """Where the first rank's slice is stored, for messages."""
        return self._ranks[0].place(name)

    def __contains__(self, name: str) -> bool:
        """Whether the ranks have the name."""
        return name in self._axes


def _axis(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...] | None, place: str) -> int | None:
    """The axis along which the slices add up to the whole; None where each slice is the whole tensor."""
    if whole is None or all(part == whole for part in parts):
        return None
    for axis in range(len(whole)):
        fits = all(
            len(part) == len(whole) and part[:axis] + part[axis + 1 :] == whole[:axis] + whole[axis + 1 :]
            for part in parts
        )
        if fits and sum(part[axis] for part in parts) == whole[axis]:
            return axis
    raise WeightError(
        f"{place}: {len(parts)} slices of shape {parts[0]} do not add up to the model's {whole}; check the "
        "model and the number of ranks"
    )


def _stacked(parts: Sequence[Tensor], fused: Fused, place: str) -> Tensor:
    """Join slices that each hold a share of every part, so that the whole parts follow one another."""
    sizes = [size // len(parts) for size in fused.parts]
    if any(size % len(parts) for size in fused.parts):
        raise WeightError(f"{place}: parts of {fused.parts} rows do not split evenly over {len(parts)} ranks")
    shares = [part.split(sizes, dim=fused.axis) for part in parts]
    return torch.cat([share[which] for which in range(len(sizes)) for share in shares], dim=fused.axis)


def _ordered(parts: Sequence[Tensor], fused: Fused, version: float, place: str) -> Tensor:
    """Join slices of Megatron's fused q, k and v in the model's row order."""
    heads = fused.heads
    if heads % len(parts):
        raise WeightError(f"{place}: {heads} heads do not split evenly over {len(parts)} ranks")
    n, d = heads // len(parts), fused.parts[0] // heads
    reordered = []
    for part in parts:
        rows = part.movedim(fused.axis, 0)
        rest = rows.shape[1:]
        if version < 1.0:
            reordered.append(rows.reshape(3, n, d, *rest).movedim(0, 1))
        elif version < 2.0:
            reordered.append(rows.reshape(n, d, 3, *rest).movedim(2, 1))
        else:
            reordered.append(rows.reshape(n, 3, d, *rest))
    whole = torch.cat(reordered)
    whole = whole if fused.together else whole.movedim(1, 0)
    return whole.flatten(0, 2).movedim(0, fused.axis).contiguous()
