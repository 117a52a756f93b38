"""The description of a weight format: how to pack and unpack, an error bound, the layout of the planes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from slipstream.errors import WeightError
from slipstream.ops.linear import Rounding, Weight

__all__ = ["Format"]


@dataclass(frozen=True)
class Format:
    """A way to store a matrix.

    Planes are contiguous and keep the matrix's leading dims and rows: plane `p` of a matrix `(..., O, I)` is
    `(..., O, n_p)`; the last one of every packed format is `(..., O)`, the float32 multiplier of each row. A
    run of rows of every plane therefore equals the result of packing that run of rows. A run of columns
    equals the result of packing those columns if the format has groups, the run starts and ends at group
    boundaries, and the rows have the same multipliers without the other columns.

    Attributes:
        name: The name in configurations and reports.
        bits: Bits per weight, including the scales of groups; a packed row has 32 more. 0 if the dtype
            decides.
        error: Bound on `|unpacked - dense|`, relative to the largest magnitude of the weight's group.
        pack: Packs a dense `(..., O, I)`, of any floating dtype and finite, into planes; its argument is not
            changed.
        unpack: Unpacks planes, given the shape and a dtype, into a new dense tensor.
        group: Inputs that share a scale, or are stored together; 0 if each input is stored on its own.
        multiple: The planes hold a multiple of this many inputs; `I` is padded up to it.
        floor: Added to the bound, relative to the largest magnitude of the row: the scales of groups have a
            narrower range than the weights.
        planes: For each plane but the last, the dtype, and the number of inputs per element.
        columns: Returns the planes of a run of inputs from those of all inputs, with the row's multiplier;
            the run must start and end at group boundaries. None if the format is not packed.
        pack_into: Packs into existing planes and returns whether it did; None if there is no such function.
        rounding: Rounding of the rows that its matrices multiply; its suffix ends the name. Stacks of
            matrices (experts) have none.
    """

    name: str
    bits: float
    error: float
    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[[tuple[Tensor, ...], tuple[int, ...], torch.dtype], Tensor]
    group: int = 0
    multiple: int = 1
    floor: float = 0.0
    planes: tuple[tuple[torch.dtype, int | Fraction], ...] = ()
    columns: Callable[[tuple[Tensor, ...], range], tuple[Tensor, ...]] | None = None
    rounding: Rounding | None = None
    pack_into: Callable[[Tensor, tuple[Tensor, ...]], bool] | None = None

    @property
    def packed_as(self) -> str:
        """The format's name without the suffix for the rounding of rows."""
        return self.name if self.rounding is None else self.name.removesuffix(self.rounding.suffix)

    def layout(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each plane of a matrix `(..., O, I)` in this (packed) format."""
        *rows, inputs = shape
        padded = -(-inputs // self.multiple) * self.multiple
        planes = [((*rows, padded // each), dtype) for dtype, each in self.planes]
        return [*planes, (tuple(rows), torch.float32)]

    def weight(self, dense: Tensor, bias: Tensor | None) -> Weight:
        """Pack a dense matrix, `(O, I)` or `(experts, O, I)`, with its bias; it unpacks to the same dtype.

        Raises:
            WeightError: The matrix is on the meta device, so it has no values.
        """
        if self.bits and dense.is_meta:
            raise WeightError(f"a matrix of shape {tuple(dense.shape)} on the meta device has no values")
        dtype = dense.dtype if self.bits else None
        name, rounding = self.name, self.rounding
        if rounding is not None and dense.dim() > 2:
            name, rounding = self.packed_as, None
        return Weight(name, tuple(dense.shape), self.pack(dense), self.unpack, bias, dtype, rounding)

    def part(self, dense: Tensor, bias: Tensor | None, run: range) -> Weight:
        """Pack a run of the inputs of a dense matrix `(..., O, I)` with the scales of the whole matrix.

        If the run begins or ends within a group, the whole group is kept, and `Weight.inside` holds the run.
        """
        if self.columns is None:
            return self.weight(dense[..., run.start : run.stop], bias)
        wide = self.whole_groups(run, dense.shape[-1])
        whole = self.weight(dense, bias)
        planes = self.columns(whole.planes, wide)
        return replace(
            whole, shape=(*whole.shape[:-1], len(wide)), planes=planes, inside=self.inside(run, wide)
        )

    def whole_groups(self, run: range, inputs: int) -> range:
        """Return the inputs of all groups that a run overlaps, for a matrix of `inputs` inputs."""
        group = self.group or 1
        return range(run.start // group * group, min(-(-run.stop // group) * group, inputs))

    def inside(self, run: range, wide: range) -> range | None:
        """Return a run's position within the result of `whole_groups`; None if both are equal."""
        return None if wide == run else range(run.start - wide.start, run.stop - wide.start)
