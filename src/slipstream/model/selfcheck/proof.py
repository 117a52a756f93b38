"""What a part of a layer was proved to be, and how near two answers must lie for that.

Shapes: any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.ops.bind import Bound

__all__ = ["Heard", "Proven", "disagreement", "is_as_near"]

Heard = tuple[Any, ...]
"""The positional arguments that a module was called with while the model ran on random input."""

_ROUNDS_AS_WELL = 1.5
"""What another order of operations may cost, in errors of the original's own rounding."""


@dataclass(frozen=True)
class Proven:
    """One kind of module as it would run.

    Attributes:
        kind: "norm", "linear", "gated feed-forward" or "attention".
        run: Called with the module and its arguments; of attention, what `attending` keeps with the module.
        op: Whose implementation it is.
        error: Largest absolute error, on random input and on what the module hears in its model.
        gains: Whether it beats the module's own code.
        takes: How many tensors it is called with; another call is the module's own.
    """

    kind: str
    run: Any
    op: Bound
    error: float
    gains: bool = True
    takes: int = 1


def disagreement(expected: Tensor, got: Tensor) -> float | None:
    """The largest absolute difference; None where it is more than rounding, which a norm may do twice."""
    bound = max(2e-5, 4 * torch.finfo(expected.dtype).eps)
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return None
    if not torch.allclose(got, expected, rtol=bound, atol=bound):
        return None
    return float((got.float() - expected.float()).abs().max())


def is_as_near(expected: Tensor, got: Tensor, exact: Tensor) -> bool:
    """Whether an answer in low precision is as near to the exact one as the original's is."""
    if got.dtype != expected.dtype or got.shape != expected.shape or expected.dtype.itemsize > 2:
        return False
    ours, theirs = (float((t.double() - exact.double()).square().mean()) for t in (got, expected))
    return ours <= _ROUNDS_AS_WELL**2 * theirs  # which NaN is not
