"""Memory that a model's weights are in, under the names that the model has for them, to be written anew.

Nothing moves: whoever knows where a tensor lies (a captured graph, a native session, a view) goes on with the
new values.

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
    """Memory that one or more of a model's tensors are in.

    Attributes:
        names: Of those tensors.
    """

    names: tuple[str, ...]

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What is written to."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What values are rounded to."""

    @abstractmethod
    def read(self) -> dict[str, Tensor]:
        """The values as the model names them: views, or new tensors."""

    @abstractmethod
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Put new values in.

        Args:
            values: All of `names`, in the shapes of the model's own tensors, finite, in any floating dtype,
                on any device; they must not lie in `tensors`, unless they are those.
        """


@dataclass(frozen=True)
class Own(Slot):
    """A tensor that the model has as it is: a parameter, a buffer, or a view of a block's."""

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
            # By rows: torch turns a matrix block by block where what it writes is contiguous, in a third
            # of the time.
            self.tensor.mT.copy_(value.mT)
        else:
            self.tensor.copy_(value)


@dataclass(frozen=True)
class _Held(Slot):
    """A `Weight` that stands for tensors of the model."""

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
    """A matrix outside of a block, packed: `(..., O, I)`, or stored by the model as `(..., I, O)`."""

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
"""Runs of rows up to which each is packed by itself: joining them first copies the matrix."""


@dataclass(frozen=True)
class Joined(_Held):
    """A tensor of a block whose rows lie in another order than the model's, or that is packed.

    Attributes:
        names: Of the model's tensors that it is made of.
        weight: It; of a bias or a vector, the one plane.
        pieces: Its rows, under the names that the recipe gives to `names`.
        paths: The model's name of each of the recipe's.
        format: How it is packed; None where it is not.
    """

    pieces: tuple[Piece, ...]
    paths: Mapping[str, str]
    format: Format | None

    def _has_runs(self) -> bool:
        """Whether the planes are a few runs of rows, which can be packed one after the other."""
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
            if piece.name:  # what has none is zero, and stays so
                plane.narrow(axis, offset, piece.count).copy_(piece.of(source.read(piece.name)))
            offset += piece.count


@dataclass(frozen=True)
class Part(_Held):
    """What one of several ranks has of tensors that the model has whole; values are those of the whole.

    Attributes:
        make: The rank's part, packed, of values by the model's names, in the dtype that is asked for.
    """

    make: Callable[[Mapping[str, Tensor]], Weight]

    def read(self) -> dict[str, Tensor]:
        """Nothing is whole here.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"{self.names[0]} lies on several ranks, and no rank alone can read it; use engine.state_dict() "
            "on all of them"
        )

    def write(self, values: Mapping[str, Tensor]) -> None:
        """See `Slot.write`."""
        if not self.weight.planes:  # what the first rank adds for all
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
    """What a block holds in another way than the model did; all else are views, which the model has itself.

    Args:
        weights: The block's.
        plans: How the layer's own tensors make them up.
        paths: The model's name of each of the layer's tensors.
        format_named: Gives the format by its name.
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
    """How a rank's part of a block's matrix is made, or of a vector, which has no format."""

    def make(values: Mapping[str, Tensor]) -> Weight:
        source = TensorSource({name: values[path] for name, path in paths.items()})
        if wanted is None or source.read(pieces[0].name).dim() == 1:
            return plain(gather(source, pieces, plan.slice))
        return read_matrix(source, plan, None, wanted)

    return make


def _tensors(
    weights: BlockWeights, plans: Mapping[Role, Plan]
) -> Iterator[tuple[Plan, Sequence[Piece], Weight]]:
    """Every tensor of a block with the pieces that it is made of; biases and vectors as plain ones."""
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
    """A tensor as it is."""
    return Weight("plain", tuple(tensor.shape), (tensor,), lambda planes, *_: planes[0])
