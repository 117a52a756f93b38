"""A product by packed weights that torch can follow: its own operations, while somebody sees each of them.

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
    """How a packed linear runs.

    Attributes:
        run: The bound op.
    """

    run: Callable[[Tensor, Weight], Tensor]

    def __call__(self, x: Tensor, weight: Weight) -> Tensor:
        """Rows `(T, I)` times a matrix, `(T, O)`."""
        if not wants_operations():
            return self.run(x, weight)
        # Steps have no derivative.
        return linear(x, replace(weight, rounding=None) if wants_derivatives(x) else weight)
