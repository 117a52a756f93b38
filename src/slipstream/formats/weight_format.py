"""What a weight format is: two functions, a bound on the error, and how the planes lie in memory."""

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
    run of rows of every plane is therefore what packing that run of rows gives; a run of columns is what
    packing those gives where the format has groups, the run starts and ends at one, and rows have the same
    multipliers without the others.

    Attributes:
        name: What configurations and reports call it.
        bits: Bits per weight, the scales of groups included; a packed row has 32 more. 0 where the dtype
            decides.
        error: Bound on `|unpacked - dense|`, relative to the largest magnitude of the weight's group.
        pack: Dense `(..., O, I)`, of any floating dtype and finite, to planes; its argument is not changed.
        unpack: Planes, shape and dtype to a new dense tensor.
        group: Inputs that share a scale, or lie together; 0 where each stands for itself.
        multiple: The planes hold a multiple of this many inputs; `I` is padded up to it.
        floor: What is added to the bound, relative to the largest magnitude of the row: the scales of groups
            have a narrower range than the weights.
        planes: Of each plane but the last the dtype, and how many inputs one element of it serves.
        columns: The planes of a run of inputs out of those of all, with the row's own multiplier, where the
            run starts and ends with groups; None where there is nothing to unpack.
        pack_into: Packs into planes that are there already, and says whether it did; None where nothing can.
        rounding: Of the rows that its matrices multiply; its suffix ends the name. Stacks of matrices, the
            experts', have none.
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
        """Name of the format without what is done to rows."""
        return self.name if self.rounding is None else self.name.removesuffix(self.rounding.suffix)

    def layout(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each plane of a matrix `(..., O, I)` in a packed format."""
        *rows, inputs = shape
        padded = -(-inputs // self.multiple) * self.multiple
        planes = [((*rows, padded // each), dtype) for dtype, each in self.planes]
        return [*planes, (tuple(rows), torch.float32)]

    def weight(self, dense: Tensor, bias: Tensor | None) -> Weight:
        """Pack a dense matrix, `(O, I)` or `(experts, O, I)`, with its bias; it unpacks to the same dtype.

        Raises:
            WeightError: A matrix on the meta device, which has no values.
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

        A group that the run begins or ends within is held whole, and said to be by `Weight.inside`.
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
        """The inputs, of so many, of all groups that a run has a part of."""
        group = self.group or 1
        return range(run.start // group * group, min(-(-run.stop // group) * group, inputs))

    def inside(self, run: range, wide: range) -> range | None:
        """Where a run stands in what `whole_groups` says of it; None where it is all of that."""
        return None if wide == run else range(run.start - wide.start, run.stop - wide.start)
