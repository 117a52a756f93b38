"""Into how many parts the tensors of a layer are cut, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import nn

from slipstream.model.split import LayerSplit
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
    """

    ranks: int
    grain: int
    group: int = 1
    align: int = 1
    held: tuple[float, ...] = ()

    def even(self, total: int) -> tuple[Runs, ...]:
        """Runs as even as they go, or such that they make up for what ranks hold of heads."""
        return even(total, self.ranks, self.group, self.grain, held=self.held)

    def beside(self, layer: nn.Module, split: LayerSplit) -> Sizes:
        """Sizes that make up for what a split gives to ranks, in whatever else of its layer is cut."""
        held, whole = [0.0] * self.ranks, 0
        for path, own in split.items():
            module = layer.get_submodule(path)
            tensors = {**module._parameters, **module._buffers}
            for name, cut in own.cuts.items():
                tensor = tensors[name]
                if tensor is not None and tensor.dim() > 1:
                    whole += tensor.numel()
                    each = tensor.numel() / tensor.shape[cut.dim]
                    held = [had + width * each for had, width in zip(held, cut.widths, strict=True)]
        left = sum(p.numel() for p in layer.parameters() if p.dim() > 1) - whole
        return replace(self, held=tuple(had / left for had in held)) if left > 0 else self
