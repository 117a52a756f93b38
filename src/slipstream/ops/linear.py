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
        planes: The format's tensors. Plain has runs of rows, one or several, which lie on top of each other
            and make up `shape`: on the CPU the model's own q, k and v, say, for joining them would copy the
            model and gain nothing. Of a packed format each has the experts first, then the rows.
        unpack: Makes the dense matrix out of planes, its shape and a dtype; not used for plain.
        bias: `(O,)` or `(experts, O)`, or None.
        dtype: That a packed matrix is unpacked to; None for plain, whose plane has its own.
    """

    format: str
    shape: tuple[int, ...]
    planes: tuple[Tensor, ...]
    unpack: Callable[..., Tensor]
    bias: Tensor | None = None
    dtype: torch.dtype | None = None

    def dense(self) -> Tensor:
        """Return the dense tensor of `shape`: for "plain" the stored one itself, else a new one."""
        if self.dtype is not None:
            return self.unpack(self.planes, self.shape, self.dtype)
        return self.planes[0] if len(self.planes) == 1 else torch.cat(self.planes, dim=-2)

    def expert(self, index: int) -> Tensor:
        """Return the dense matrix of one expert, without unpacking the others."""
        if self.dtype is None:
            runs = [plane[index] for plane in self.planes]
            return runs[0] if len(runs) == 1 else torch.cat(runs)
        return self.unpack(tuple(plane[index] for plane in self.planes), self.shape[1:], self.dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of a matrix, `(n, I)`, without unpacking the others.

        Args:
            index: `(n,)` int64 within the rows, in any order.

        Raises:
            IndexError: A row that is not there.
        """
        if self.dtype is None:
            return self.dense().index_select(0, index)
        planes = tuple(plane.index_select(0, index) for plane in self.planes)
        return self.unpack(planes, (len(index), self.shape[-1]), self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held by the planes and the bias."""
        tensors = self.planes if self.bias is None else (*self.planes, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> Weight:
        """Return the weight with `fn`, a move or a cast, applied to each of its tensors.

        A cast leaves packed planes as they are and changes what they are unpacked to.
        """
        bias = None if self.bias is None else fn(self.bias)
        if self.dtype is None:
            return replace(self, planes=tuple(fn(plane) for plane in self.planes), bias=bias)
        planes = tuple(_moved(plane, fn) for plane in self.planes)
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.planes[0].device)).dtype
        return replace(self, planes=planes, bias=bias, dtype=dtype)


def _moved(plane: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    moved = fn(plane)
    return moved if moved.dtype == plane.dtype else plane.to(moved.device)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return `x @ dense(weight).T + bias`.

    Args:
        x: `(T, I)`, any floating dtype.
        weight: Of shape `(O, I)`.

    Returns:
        `(T, O)` in the dtype of `x`.
    """
    if weight.dtype is not None or len(weight.planes) == 1:
        return F.linear(x, weight.dense(), weight.bias)
    runs = weight.planes
    biases = [None] * len(runs) if weight.bias is None else weight.bias.split([len(rows) for rows in runs])
    return torch.cat([F.linear(x, rows, bias) for rows, bias in zip(runs, biases, strict=True)], dim=-1)


def _case(
    name: str, rows: int, inputs: int, outputs: int, *, bias: bool, runs: tuple[int, ...] | None = None
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        matrix = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
        b = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        planes = matrix.split(runs or (outputs,))
        return {"x": x, "weight": Weight("plain", (outputs, inputs), planes, lambda *_: matrix, b)}

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
        _case("rows in three runs", 3, 64, 96, bias=True, runs=(64, 16, 16)),
        _case("rows in two runs, one row", 1, 96, 192, bias=False, runs=(96, 96)),
    ),
)
