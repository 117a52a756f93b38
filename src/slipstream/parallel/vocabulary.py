"""Matrices whose rows are split over ranks: the token embedding and the vocabulary projection.

Shapes: V vocabulary, C hidden, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.ops.linear import Weight
from slipstream.parallel.collectives import all_sum, gather_last
from slipstream.parallel.mesh import ALONE, Axis
from slipstream.parallel.shard import spread

__all__ = ["SplitRows", "joined_linear", "split_rows"]

Linear = Callable[[Tensor, Weight], Tensor]


@dataclass(frozen=True)
class SplitRows(Weight):
    """A matrix `(V, C)` of which this rank holds some rows; its operations are collective.

    Attributes:
        local: The rank's rows, in any format.
        axis: The ranks.
    """

    local: Weight | None = None
    axis: Axis = ALONE.tp

    @property
    def held(self) -> Weight:
        """The rank's rows."""
        if self.local is None:
            raise AssertionError("a split matrix holds rows")
        return self.local

    @property
    def runs(self) -> list[range]:
        """The rows of each rank."""
        return spread(self.shape[0], self.axis.size)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows `(n, C)` by their numbers in the whole matrix, bitwise the same on every rank."""
        own = self.runs[self.axis.rank]
        inside = (index >= own.start) & (index < own.stop)
        found = self.held.rows((index - own.start).clamp(0, len(own) - 1))
        return all_sum(found.masked_fill(~inside[:, None], 0.0), self.axis)

    def dense(self) -> Tensor:
        """The whole matrix, gathered from all ranks into a new tensor."""
        columns = self.held.dense().mT.contiguous()
        return gather_last(columns, self.axis, [len(run) for run in self.runs]).mT

    def expert(self, index: int) -> Tensor:
        """Refuse: the vocabulary has no experts.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("the vocabulary has no experts")

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's own rows."""
        return self.held.nbytes

    def apply(self, fn: Callable[[Tensor], Tensor]) -> SplitRows:
        """See `Weight.apply`."""
        local = self.held.apply(fn)
        bias = None if self.bias is None else fn(self.bias)
        return replace(self, local=local, planes=local.planes, bias=bias, dtype=_dtype(local))


def _dtype(weight: Weight) -> torch.dtype:
    return weight.dtype or weight.planes[0].dtype


def split_rows(shape: tuple[int, ...], local: Weight, axis: Axis) -> SplitRows:
    """Make a matrix of this shape, of which `local` is the rank's run of rows."""
    return SplitRows(
        local.format,
        shape,
        local.planes,
        local.unpack,
        dtype=_dtype(local),
        rounding=local.rounding,
        local=local,
        axis=axis,
    )


def joined_linear(run: Linear) -> Linear:
    """Return a linear that multiplies by the rank's rows and joins the output columns of all ranks."""

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if not isinstance(weight, SplitRows):
            return run(x, weight)
        own = weight.runs[weight.axis.rank]
        bias = None if weight.bias is None else weight.bias[own.start : own.stop]
        part = run(x, replace(weight.held, bias=bias))
        return gather_last(part, weight.axis, [len(run) for run in weight.runs])

    return linear
