"""Results of checking a module inside a layer, and how close two outputs must be to pass.

Shapes: any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.ops.bind import Bound

__all__ = ["RecordedInputs", "Proven", "disagreement", "is_as_near"]

RecordedInputs = tuple[Any, ...]
"""The positional arguments that a module was called with while the model ran on random input."""

_ROUNDS_AS_WELL = 1.5
"""Maximum error of another order of operations, as a multiple of the original's own rounding error."""


@dataclass(frozen=True)
class Proven:
    """A replacement that passed the check for one kind of module.

    Attributes:
        kind: "norm", "linear", "gated feed-forward" or "attention".
        run: Called with the module and its arguments; for attention, what `attending` stores with the module.
        op: The op that implements it.
        error: Largest absolute error, on random input and on the module's arguments recorded in its model.
        gains: Whether it is faster than the module's own code.
        takes: Number of tensors that it is called with; other calls run the module's own code.
    """

    kind: str
    run: Any
    op: Bound
    error: float
    gains: bool = True
    takes: int = 1


def disagreement(expected: Tensor, got: Tensor) -> float | None:
    """Return the largest absolute difference; None if it exceeds rounding, which a norm may do twice."""
    bound = max(2e-5, 4 * torch.finfo(expected.dtype).eps)
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return None
    if not torch.allclose(got, expected, rtol=bound, atol=bound):
        return None
    return float((got.float() - expected.float()).abs().max())


def is_as_near(expected: Tensor, got: Tensor, exact: Tensor) -> bool:
    """Whether a low-precision output is about as close to the exact one as the original's output is."""
    if got.dtype != expected.dtype or got.shape != expected.shape or expected.dtype.itemsize > 2:
        return False
    ours, theirs = (float((t.double() - exact.double()).square().mean()) for t in (got, expected))
    return ours <= _ROUNDS_AS_WELL**2 * theirs  # false for NaN
