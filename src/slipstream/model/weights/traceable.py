"""Products with packed weights that run as torch operations while those are traced or recorded.

Shapes: T packed tokens, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.model.values import wants_derivatives, wants_operations
from slipstream.ops.linear import Weight, linear

__all__ = ["Seen"]


@dataclass(frozen=True)
class Seen:
    """The product of a packed linear: the bound op, or plain torch operations while those are observed.

    Attributes:
        run: The bound op.
    """

    run: Callable[[Tensor, Weight], Tensor]

    def __call__(self, x: Tensor, weight: Weight) -> Tensor:
        """Multiply rows `(T, I)` by a matrix; returns `(T, O)`."""
        if not wants_operations():
            return self.run(x, weight)
        # The rounding of rows to steps has no derivative.
        return linear(x, replace(weight, rounding=None) if wants_derivatives(x) else weight)
