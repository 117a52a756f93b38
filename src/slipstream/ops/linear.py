"""A matrix in any weight format, times packed rows, with its bias.

Shapes: T packed tokens, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.bind import Case, Op

__all__ = ["OP", "Weight", "linear"]


@dataclass(frozen=True)
class Weight:
    """A matrix (or a stack of them, one per expert) in a weight format, with its bias.

    Attributes:
        format: The format's name; "plain" is a dense tensor.
        shape: `(O, I)` or `(experts, O, I)` of the matrix that the planes stand for.
        planes: The format's tensors, owned by this object; plain has one, of `shape`.
        unpack: Makes the dense matrix out of the planes.
        bias: `(O,)` or `(experts, O)`, or None.
    """

    format: str
    shape: tuple[int, ...]
    planes: tuple[Tensor, ...]
    unpack: Callable[[tuple[Tensor, ...]], Tensor]
    bias: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the matrix as a dense tensor of `shape`; for "plain" the stored tensor itself."""
        return self.unpack(self.planes)

    @property
    def nbytes(self) -> int:
        """Bytes held by the planes and the bias."""
        tensors = self.planes if self.bias is None else (*self.planes, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> Weight:
        """Return the weight with `fn`, a move or a cast, applied to each of its tensors."""
        bias = None if self.bias is None else fn(self.bias)
        return replace(self, planes=tuple(fn(plane) for plane in self.planes), bias=bias)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return `x @ dense(weight).T + bias`.

    Args:
        x: `(T, I)`, any floating dtype.
        weight: Of shape `(O, I)`.

    Returns:
        `(T, O)` in the dtype of `x`.
    """
    return F.linear(x, weight.dense(), weight.bias)


def _case(name: str, rows: int, inputs: int, outputs: int, *, bias: bool) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        matrix = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
        b = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        return {"x": x, "weight": Weight("plain", (outputs, inputs), (matrix,), lambda planes: planes[0], b)}

    return Case(name, make)


OP = Op(
    "linear",
    linear,
    (
        _case("one row", 1, 64, 128, bias=False),
        _case("one row, bias", 1, 576, 192, bias=True),
        _case("a few rows", 5, 96, 33, bias=True),
        _case("odd widths", 3, 77, 101, bias=False),
        _case("one more than a tile", 65, 129, 65, bias=True),
        _case("width one", 2, 1, 1, bias=True),
    ),
)
