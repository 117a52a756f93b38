"""The number of parts into which a layer's tensors are cut, and the boundaries of the cuts."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import nn

from slipstream.model.tensor_parallel.split import LayerSplit
from slipstream.parallel.plan import Runs, even

__all__ = ["UNITS", "Sizes"]

UNITS = re.compile(r"intermediate|inner|ffn|expert|hidden|size|dim|width")
"""Names of attributes that may hold the width of a feed-forward."""


@dataclass(frozen=True)
class Sizes:
    """How many parts to cut into, and where.

    Attributes:
        ranks: Number of parts.
        grain: Parts that do not depend on heads end at multiples of this, if they are then even enough.
        group: Group size of the weight format, used instead of `grain` for tensors that are too narrow.
        align: Number of elements in 16 bytes, to which grouped products need rows of experts aligned.
        held: What each rank holds of heads that are not dealt evenly, as multiples of what is left to cut.
        turn: Rotation of the places to which heads are dealt (`Turns`).
    """

    ranks: int
    grain: int
    group: int = 1
    align: int = 1
    held: tuple[float, ...] = ()
    turn: int = 0

    def even(self, total: int) -> tuple[Runs, ...]:
        """Divide `total` as evenly as possible, compensating for what ranks hold of heads (`held`)."""
        return even(total, self.ranks, self.group, self.grain, held=self.held)

    def beside(self, layer: nn.Module, split: LayerSplit) -> Sizes:
        """Return sizes whose `held` compensates, in the rest of the layer, for an uneven split of heads."""
        loads, whole = self.loads(layer, split)
        left = sum(p.numel() for p in layer.parameters() if p.dim() > 1) - whole
        return replace(self, held=tuple(load / left for load in loads)) if left > 0 else self

    def loads(self, layer: nn.Module, split: LayerSplit) -> tuple[list[int], int]:
        """Return how many elements of the matrices in a split each rank holds, and their total number."""
        loads, whole = [0] * self.ranks, 0
        for path, own in split.items():
            module = layer.get_submodule(path)
            tensors = {**module._parameters, **module._buffers}
            for name, cut in own.cuts.items():
                tensor = tensors[name]
                if tensor is not None and tensor.dim() > 1:
                    whole += tensor.numel()
                    each = tensor.numel() // tensor.shape[cut.dim]
                    loads = [load + width * each for load, width in zip(loads, cut.widths, strict=True)]
        return loads, whole
