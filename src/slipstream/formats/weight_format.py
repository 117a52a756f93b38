"""What a weight format is: two functions and a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from slipstream.ops.linear import Weight

__all__ = ["Format"]


@dataclass(frozen=True)
class Format:
    """A way to store a matrix.

    Attributes:
        name: What configurations and reports call it.
        bits: Bits per weight, scales included, at the default group size; 0 where the dtype decides.
        error: Bound on `|unpacked - dense|`, relative to the largest magnitude of the weight's group.
        pack: Dense `(..., O, I)` to planes.
        unpack: Planes to dense.
    """

    name: str
    bits: float
    error: float
    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[[tuple[Tensor, ...]], Tensor]

    def weight(self, dense: Tensor, bias: Tensor | None) -> Weight:
        """Pack a dense matrix, `(O, I)` or `(experts, O, I)`, with its bias."""
        return Weight(self.name, tuple(dense.shape), self.pack(dense), self.unpack, bias)
