"""What a module was handed, or answered: the tensors within tuples, lists and mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in its order; what is no tensor, tuple, list or mapping has none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
