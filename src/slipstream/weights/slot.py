"""Slots: the memory that holds a model's weights, under the model's names, so that new values can be written.

Tensors keep their addresses, so everything that refers to them (a captured graph, a native session, a view)
sees the new values.

Shapes: I input width, O output width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.errors import UnsupportedError
from slipstream.formats import Format
from slipstream.ops.linear import Weight
from slipstream.spec import Role
from slipstream.weights.load import BlockWeights, own_views, read_matrix
from slipstream.weights.recipe import Piece, Plan, gather, scatter
from slipstream.weights.source import Source

__all__ = ["Joined", "Own", "Packed", "Part", "Slot", "TensorSource", "block_slots", "plain"]


class TensorSource(Source):
    """Tensors that are in memory, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold the tensors; nothing is copied."""
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        """Every tensor's name."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """The tensor itself."""
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        """Whether a tensor has this name."""
        return name in self._tensors


class Slot(ABC):
    """Memory that holds one or more of a model's tensors.

    Attributes:
        names: The model's names of those tensors.
    """

    names: tuple[str, ...]

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that `write` changes."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype to which new values are converted."""

    @abstractmethod
    def read(self) -> dict[str, Tensor]:
        """Return the values by the model's names: views or new tensors."""

    @abstractmethod
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Write new values.

        Args:
            values: All of `names`, in the shapes of the model's own tensors, finite, in any floating dtype,
                on any device; they must not overlap `tensors` unless they are the same tensors.
        """


@dataclass(frozen=True)
class Own(Slot):
    """A tensor stored in the model's own layout: a parameter, a buffer, or a view of a block's tensor."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `Slot.tensors`."""
        return (self.tensor,)

    @property
    def dtype(self) -> torch.dtype:
        """See `Slot.dtype`."""
        return self.tensor.dtype

    def read(self) -> dict[str, Tensor]:
        """See `Slot.read`."""
        return dict.fromkeys(self.names, self.tensor)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """See `Slot.write`."""
        value = values[self.names[0]]
        if value.data_ptr() == self.tensor.data_ptr() and value.stride() == self.tensor.stride():
            return
        if self.tensor.dim() > 1 and not self.tensor.is_contiguous() and self.tensor.mT.is_contiguous():
            # Write to the contiguous side: torch then transposes block by block, in a third of the time.
            self.tensor.mT.copy_(value.mT)
        else:
            self.tensor.copy_(value)


@dataclass(frozen=True)
class _Held(Slot):
    """A `Weight` that holds tensors of the model in another layout."""

    names: tuple[str, ...]
    weight: Weight

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `Slot.tensors`."""
        return self.weight.planes

    @property
    def dtype(self) -> torch.dtype:
        """See `Slot.dtype`."""
        return _dtype(self.weight)


@dataclass(frozen=True)
class Packed(_Held):
    """A packed matrix outside of a block, `(..., O, I)`; `transposed` if the model stores `(..., I, O)`."""

    format: Format
    transposed: bool

    def read(self) -> dict[str, Tensor]:
        """See `Slot.read`."""
        dense = self.weight.dense()
        return dict.fromkeys(self.names, dense.mT if self.transposed else dense)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """See `Slot.write`."""
        value = values[self.names[0]]
        _repack(self.weight, self.format, value.mT if self.transposed else value)


_MOST_RUNS = 4
"""Up to this many runs of rows are packed one by one; joining them first would copy the matrix."""


@dataclass(frozen=True)
class Joined(_Held):
    """A tensor of a block that is packed, or whose rows are in another order than the model's.

    Attributes:
        names: The model's names of the tensors that it is made of.
        weight: The tensor; a bias or a vector is a plain weight of one plane.
        pieces: The pieces of its rows, with the layer's own names of the tensors.
        paths: The model's names by the layer's own names.
        format: The format it is packed in; None for a plain tensor.
    """

    pieces: tuple[Piece, ...]
    paths: Mapping[str, str]
    format: Format | None

    def _has_runs(self) -> bool:
        """Whether the matrix consists of a few runs of rows that can be packed one after the other."""
        rows = self.weight.shape[0]
        return (
            len(self.weight.shape) == 2
            and len(self.pieces) <= _MOST_RUNS
            and all(piece.name for piece in self.pieces)
            and all(plane.shape[0] == rows for plane in self.weight.planes)
        )

    def read(self) -> dict[str, Tensor]:
        """See `Slot.read`."""
        own = scatter(self.pieces, self.weight.dense())
        return {path: own[name] for name, path in self.paths.items()}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """See `Slot.write`."""
        source = TensorSource({name: values[path] for name, path in self.paths.items()})
        if self.format is not None:
            if not self._has_runs():
                _repack(self.weight, self.format, gather(source, self.pieces))
                return
            start = 0
            for piece in self.pieces:
                planes = tuple(plane.narrow(0, start, piece.count) for plane in self.weight.planes)
                rows = replace(self.weight, shape=(piece.count, self.weight.shape[1]), planes=planes)
                _repack(rows, self.format, piece.of(source.read(piece.name)))
                start += piece.count
            return
        (plane,) = self.weight.planes
        axis = -1 if plane.dim() == 1 or self.pieces[0].bias else -2
        offset = 0
        for piece in self.pieces:
            if piece.name:  # rows without a name are zero and stay zero
                plane.narrow(axis, offset, piece.count).copy_(piece.of(source.read(piece.name)))
            offset += piece.count


@dataclass(frozen=True)
class Part(_Held):
    """One rank's part of the model's tensors; `write` takes the whole tensors.

    Attributes:
        make: Makes the rank's packed part from whole tensors by the model's names, in the slot's dtype.
    """

    make: Callable[[Mapping[str, Tensor]], Weight]

    def read(self) -> dict[str, Tensor]:
        """Refuse: a rank does not have whole tensors.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"{self.names[0]} is split over several ranks, so one rank cannot read it; call "
            "engine.state_dict() on all of them"
        )

    def write(self, values: Mapping[str, Tensor]) -> None:
        """See `Slot.write`."""
        if not self.weight.planes:  # a bias that only the first rank adds
            return
        place = self.weight.planes[0].device
        own = {name: values[name].to(place, self.dtype) for name in self.names}
        for plane, new in zip(self.weight.planes, self.make(own).planes, strict=True):
            plane.copy_(new.reshape(plane.shape))


def _dtype(weight: Weight) -> torch.dtype:
    return weight.planes[0].dtype if weight.dtype is None else weight.dtype


def _repack(weight: Weight, packed: Format, dense: Tensor) -> None:
    dense = dense.to(weight.planes[0].device, _dtype(weight))
    if packed.pack_into is not None and packed.pack_into(dense, weight.planes):
        return
    for plane, new in zip(weight.planes, packed.pack(dense), strict=True):
        plane.copy_(new)


def block_slots(
    weights: BlockWeights,
    plans: Mapping[Role, Plan],
    paths: Mapping[str, str],
    format_named: Callable[[str], Format],
) -> Iterator[Slot]:
    """Yield a slot for each tensor of a block that is not made up of views, which the model itself lists.

    Args:
        weights: The block's weights.
        plans: Plans by which the block's tensors are made of the layer's own.
        paths: The model's names by the layer's own names.
        format_named: Returns a format by its name.
    """
    own = own_views(weights, plans)
    for plan, pieces, weight in _tensors(weights, plans):
        names = dict.fromkeys(piece.name for piece in pieces if piece.name)
        if all(own[name] is not None for name in names):
            continue
        made = {name: paths[name] for name in names}
        if plan.slice.is_whole:
            packed = None if weight.format == "plain" else format_named(weight.packed_as)
            yield Joined(tuple(made.values()), weight, tuple(pieces), made, packed)
        else:
            wanted = None if pieces is not plan.weight else format_named(weight.packed_as)
            yield Part(tuple(made.values()), weight, _maker(plan, pieces, made, wanted))


def _maker(
    plan: Plan, pieces: Sequence[Piece], paths: Mapping[str, str], wanted: Format | None
) -> Callable[[Mapping[str, Tensor]], Weight]:
    """Return the function that makes a rank's part of a block's matrix or vector (a vector has no format)."""

    def make(values: Mapping[str, Tensor]) -> Weight:
        source = TensorSource({name: values[path] for name, path in paths.items()})
        if wanted is None or source.read(pieces[0].name).dim() == 1:
            return plain(gather(source, pieces, plan.slice))
        return read_matrix(source, plan, None, wanted)

    return make


def _tensors(
    weights: BlockWeights, plans: Mapping[Role, Plan]
) -> Iterator[tuple[Plan, Sequence[Piece], Weight]]:
    """Every tensor of a block with its plan and pieces; biases and vectors are wrapped as plain weights."""
    for role, matrix in weights.matrices.items():
        yield plans[role], plans[role].weight, matrix
        if matrix.bias is not None:
            yield plans[role], plans[role].bias, plain(matrix.bias)
    for role, vector in weights.vectors.items():
        if vector.weight is not None:
            yield plans[role], plans[role].weight, plain(vector.weight)
        if vector.bias is not None:
            yield plans[role], plans[role].bias, plain(vector.bias)


def plain(tensor: Tensor) -> Weight:
    """Wrap a tensor as a plain weight."""
    return Weight("plain", tuple(tensor.shape), (tensor,), lambda planes, *_: planes[0])
