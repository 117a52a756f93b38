"""Into how many parts the tensors of a layer are cut, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import nn

from slipstream.model.tensor_parallel.split import LayerSplit
from slipstream.parallel.plan import Runs, even

__all__ = ["UNITS", "Sizes"]

UNITS = re.compile(r"intermediate|inner|ffn|expert|hidden|size|dim|width")
"""Names of attributes that may be the width of a feed-forward."""


@dataclass(frozen=True)
class Sizes:
    """Into how many parts, and where.

    Attributes:
        ranks: Number of parts.
        grain: Parts that heads do not decide end at multiples of this, where they are even enough.
        group: As `grain`, of a weight format, for what is narrower than the grain.
        align: Numbers in 16 bytes, at which grouped products want rows of experts to begin and end.
        held: What ranks have of heads that are not dealt evenly, as multiples of what is left to cut.
        turn: By how many places the ranks are moved that heads are dealt to.
    """

    ranks: int
    grain: int
    group: int = 1
    align: int = 1
    held: tuple[float, ...] = ()
    turn: int = 0

    def even(self, total: int) -> tuple[Runs, ...]:
        """Runs as even as they go, or such that they make up for what ranks hold of heads."""
        return even(total, self.ranks, self.group, self.grain, held=self.held)

    def beside(self, layer: nn.Module, split: LayerSplit) -> Sizes:
        """Sizes that make up for what a split gives to ranks, in whatever else of its layer is cut."""
        loads, whole = self.loads(layer, split)
        left = sum(p.numel() for p in layer.parameters() if p.dim() > 1) - whole
        return replace(self, held=tuple(load / left for load in loads)) if left > 0 else self

    def loads(self, layer: nn.Module, split: LayerSplit) -> tuple[list[int], int]:
        """How many numbers of the matrices that a split cuts each rank has, and how many there are."""
        loads, whole = [0] * self.ranks, 0
        for path, own in split.items():
            module = layer.get_submodule(path)
            tensors = {**module._parameters, **module._buffers}
            for name, cut in own.cuts.items():
                tensor = tensors[name]
                if tensor is not None and tensor.dim() > 1:
                    whole += tensor.numel()
                    each = tensor.numel() // tensor.shape[cut.dim]
                    loads = [had + width * each for had, width in zip(loads, cut.widths, strict=True)]
        return loads, whole
