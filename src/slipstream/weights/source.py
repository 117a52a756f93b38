"""Sources of weights: lazy mappings from names to shapes and slices, for modules and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import WeightError
from slipstream.formats import Format
from slipstream.ops.linear import Weight

__all__ = ["ModuleSource", "Source", "TwiceError", "same_values"]


class TwiceError(WeightError):
    """Two files of a checkpoint have a tensor of the same name with different values."""


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal values; dtypes may differ if both have at least 16 bits; NaN differs."""
    both = one.dtype
    if one.dtype != other.dtype:
        if min(one.dtype.itemsize, other.dtype.itemsize) < 2:
            return False
        both = torch.promote_types(one.dtype, other.dtype)
    return one.shape == other.shape and torch.equal(one.to(both), other.to(both))


class Source(ABC):
    """Tensors by name; any slice of one can be read without reading the rest."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Every tensor's name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it.

        Raises:
            KeyError: No tensor has this name.
        """

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return a tensor, or a view whose slices are read when they are used; the caller must not change it.

        Raises:
            KeyError: No tensor has this name.
        """

    def part(
        self, name: str, rows: Sequence[range] | None, columns: range | None, experts: range | None
    ) -> Tensor | None:
        """Return a part of a tensor that is assembled on reading, without assembling the rest of it.

        Args:
            name: Name of the tensor, a stack `(E, R, C)`.
            rows: Runs of rows of every expert; None for all.
            columns: Columns of every expert; None for all.
            experts: Experts; None for all.

        Returns:
            A new tensor, or None where slicing the result of `read` costs no more.
        """
        return None

    def packed(self, name: str, wanted: Format, pieces: Sequence[Any] = ()) -> Weight | None:
        """Return a matrix that is stored in a packed format already, without its bias.

        Args:
            name: Name of a tensor, or `layer:role`.
            wanted: The required format.
            pieces: For a role, the pieces of its rows (`recipe.Piece`, with the names in the source).

        Returns:
            The matrix `(..., O, I)` in canonical orientation, with any dtype to unpack to, or None where the
            caller has to pack the result of `read`.
        """
        return None

    def stored(self, name: str) -> Tensor | None:
        """Return the stored values to check for NaN and infinity; None where they cannot hold any."""
        return self.read(name)

    def views(self, name: str) -> Sequence[Tensor]:
        """Return the stored tensors that a tensor is made of, as views not read yet; () if there are none."""
        return ()

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is stored in a packed format."""
        return False

    def home(self, name: str) -> str:
        """Return a key that is equal for tied names whose value the source stores once."""
        return ""

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values; both are read and then released."""
        equal = same_values(self.read(one), self.read(other))
        self.release((one, other))
        return equal

    def by_windows(self) -> None:  # noqa: B027 - most sources are no mapped files
        """From now on map tensors one by one: only those that are in use take address space."""

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the descriptor and first byte of the file range of a view that was mapped by itself.

        The view must be contiguous (see `by_windows`). None where it is not a view of a file, or where it may
        have been written to.
        """
        return None

    def prefetch(self, names: Iterable[str]) -> None:  # noqa: B027 - most sources have nothing to do
        """Start to load tensors into memory that will be read soon."""

    def release(self, names: Iterable[str]) -> None:  # noqa: B027
        """Release the memory of tensors that were read; they can be read again."""

    def place(self, name: str) -> str:
        """Where a tensor is stored, for messages."""
        return name

    def __contains__(self, name: str) -> bool:
        """Whether a tensor has this name."""
        return name in set(self.names())


class ModuleSource(Source):
    """The parameters of a live module by their paths; floating-point buffers can be read by name as well."""

    def __init__(self, module: nn.Module) -> None:
        """Take the tensors as they are now; nothing is copied."""
        own = {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
        floats = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self._names, self._tensors = tuple(own), floats | own

    def names(self) -> Iterable[str]:
        """Every parameter's path; the families of the few layers with weights in buffers name those."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter or buffer."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """The tensor itself, detached."""
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        """Whether a parameter or a buffer has this path."""
        return name in self._tensors
