"""Where weights come from: a lazy mapping from names to shapes and slices, for modules and files."""

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
    """Two files of a checkpoint have a tensor of one name, and its values differ."""


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, in whichever dtypes of 16 bits and more; with NaN they are not."""
    both = one.dtype
    if one.dtype != other.dtype:
        if min(one.dtype.itemsize, other.dtype.itemsize) < 2:
            return False
        both = torch.promote_types(one.dtype, other.dtype)
    return one.shape == other.shape and torch.equal(one.to(both), other.to(both))


class Source(ABC):
    """Tensors by name, of which any slice can be had without reading the rest."""

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
        """Some of a tensor that is made when it is read, made of no more than that.

        Args:
            name: Of the tensor, a stack `(E, R, C)`.
            rows: Runs of every expert's; None for all.
            columns: Of every expert's; None for all.
            experts: Which; None for all.

        Returns:
            A new tensor, or None where slices of what `read` returns are as good.
        """
        return None

    def packed(self, name: str, wanted: Format, pieces: Sequence[Any] = ()) -> Weight | None:
        """A matrix in a packed format, if it lies so already; without a bias.

        Args:
            name: Of the tensor; or `layer:role`.
            wanted: The format to have it in.
            pieces: Of a role, what its rows are (`recipe.Piece`, with the tensors' names in the source).

        Returns:
            The matrix `(..., O, I)` in canonical orientation, of any dtype to unpack to, or None where it has
            to be packed from `read`.
        """
        return None

    def stored(self, name: str) -> Tensor | None:
        """What a tensor is stored as, to look for NaN and infinity; None where there can be none."""
        return self.read(name)

    def views(self, name: str) -> Sequence[Tensor]:
        """Stored tensors that one is made of, as views of which nothing is read yet; () if there are none."""
        return ()

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is stored in a packed format."""
        return False

    def home(self, name: str) -> str:
        """A word that names of one model tensor share where the source has one value for them."""
        return ""

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values; both are read, and let go of."""
        equal = same_values(self.read(one), self.read(other))
        self.release((one, other))
        return equal

    def by_windows(self) -> None:  # noqa: B027 - most sources are no mapped files
        """From now on take no more address space than what has been read and is still held."""

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Where a contiguous view that was read by windows lies in a file: its descriptor, the first byte.

        None where it is no view of a file, or somebody may have written to it.
        """
        return None

    def prefetch(self, names: Iterable[str]) -> None:  # noqa: B027 - most sources have nothing to do
        """Begin to bring tensors into memory that will be read soon."""

    def release(self, names: Iterable[str]) -> None:  # noqa: B027
        """Let go of the memory of tensors that were read; they can be read again."""

    def place(self, name: str) -> str:
        """Where a tensor lies, for messages."""
        return name

    def __contains__(self, name: str) -> bool:
        """Whether a tensor has this name."""
        return name in set(self.names())


class ModuleSource(Source):
    """The parameters of a live module by their paths, and for who asks by name its buffers of floats."""

    def __init__(self, module: nn.Module) -> None:
        """Take the tensors as they are now; nothing is copied."""
        own = {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
        floats = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self._names, self._tensors = tuple(own), floats | own

    def names(self) -> Iterable[str]:
        """Every parameter's path: buffers carry weights in few layers, whose families name them."""
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
