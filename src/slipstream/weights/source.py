"""Where weights come from: a lazy mapping from names to shapes and slices, for modules and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["ModuleSource", "Source"]


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

    def __contains__(self, name: str) -> bool:
        """Whether a tensor has this name."""
        return name in set(self.names())


class ModuleSource(Source):
    """The parameters of a live module, by their paths from it."""

    def __init__(self, module: nn.Module) -> None:
        """Take the parameters as they are now; nothing is copied."""
        self._tensors = {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}

    def names(self) -> Iterable[str]:
        """Every parameter's path."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """The parameter itself, detached."""
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        """Whether a parameter has this path."""
        return name in self._tensors
