"""Layouts of expert stacks that files store matrix by matrix, so that a part can be read without the rest.

Shapes: E experts, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from slipstream.errors import WeightError

__all__ = ["Layout", "layouts_of"]

_Make = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Layout:
    """How a tensor `(E, R, C)` is stacked from whole stored matrices.

    Attributes:
        names: For each expert, the names of its matrices, in the order of their rows.
        starts: The row at which each matrix begins, and finally R.
    """

    names: tuple[tuple[str, ...], ...]
    starts: tuple[int, ...]

    def part(
        self,
        read: Callable[[str], Tensor],
        rows: Sequence[range] | None,
        columns: range | None,
        experts: range | None,
    ) -> Tensor:
        """Read a part of the tensor; None stands for all rows, columns or experts.

        Args:
            read: Returns a stored matrix, of which only the rows and columns used are accessed.
            rows: Runs of rows of every expert.
            columns: Columns of every expert.
            experts: Experts.

        Returns:
            The part as a new tensor `(E, R, C)`.
        """
        wide = slice(None) if columns is None else slice(columns.start, columns.stop)
        chosen = self.names if experts is None else self.names[experts.start : experts.stop]
        runs = (range(self.starts[-1]),) if rows is None else rows
        pieces = [
            (place, max(run.start, first) - first, min(run.stop, last) - first)
            for run in runs
            for place, (first, last) in enumerate(pairwise(self.starts))
            if run.start < last and run.stop > first
        ]
        count = sum(stop - start for _, start, stop in pieces)
        out: Tensor | None = None
        for expert, names in enumerate(chosen):
            row = 0
            for place, start, stop in pieces:
                own = read(names[place])[start:stop, wide]
                if out is None:
                    out = own.new_empty(len(chosen), count, own.shape[1])
                out[expert, row : row + len(own)] = own
                row += len(own)
        if out is None:
            raise AssertionError("nothing was requested")
        return out


def layouts_of(
    make: _Make, shapes: Mapping[str, tuple[int, ...]], made: Mapping[str, tuple[int, ...]]
) -> dict[str, Layout]:
    """Find out how a conversion stacks matrices by running it on small matrices with distinct values.

    Args:
        make: Runs the conversion on tensors by their stored names.
        shapes: Shapes of the stored tensors.
        made: Shapes of the tensors that the conversion makes, by name.

    Returns:
        The layout of each tensor that is a stack of whole matrices; other tensors are left out.
    """
    if any(len(shape) != 2 for shape in shapes.values()):
        return {}
    names = list(shapes)
    few = torch.arange(4.0 * len(names), dtype=torch.float32, device="cpu").view(-1, 2, 2)
    try:
        small = make({name: few[place].clone() for place, name in enumerate(names)})
    except WeightError:  # the conversion depends on the sizes
        return {}
    found = {name: _layout(small[name], few, names, shapes) for name in made if name in small}
    return {
        name: layout
        for name, layout in found.items()
        if layout is not None and _shape(layout, shapes) == made[name]
    }


def _layout(
    small: Tensor, few: Tensor, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> Layout | None:
    if small.dim() != 3 or small.shape[1] % 2 or small.shape[2] != 2:
        return None
    blocks = small.unflatten(1, (-1, 2))
    places = (blocks[..., 0, 0] / 4).round().to(torch.int64)
    if not torch.equal(blocks, few[places]):
        return None
    table = tuple(tuple(names[place] for place in row) for row in places.tolist())
    return Layout(table, (0, *accumulate(shapes[name][0] for name in table[0])))


def _shape(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Shape of the whole stack; None unless all experts have matrices of the same shapes."""
    alike = {tuple(shapes[name][0] for name in row) for row in layout.names}
    widths = {shapes[name][1] for row in layout.names for name in row}
    if len(alike) > 1 or len(widths) > 1:
        return None
    return (len(layout.names), layout.starts[-1], *widths)
