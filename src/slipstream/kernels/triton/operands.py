"""A matrix as the kernels take it, and what stands before and after it in a layer.

Shapes: T rows, I inputs, O outputs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Around", "Matrix", "planes_of"]


@dataclass(frozen=True)
class Matrix:
    """A matrix as a kernel takes it.

    Attributes:
        planes: `(O, n)` each, or `(E, O, n)`.
        bias: `(O,)` or `(E, O)`, or None.
        kind: Number of the weight format.
        blocks: Blocks of 32 inputs in one of its groups.
        outputs: O.
    """

    planes: list[Tensor]
    bias: Tensor | None
    kind: int
    blocks: int
    outputs: int


@dataclass(frozen=True)
class Around:
    """What stands before and after a matrix.

    Attributes:
        norm: 0 for none, 1 for an RMS norm, 2 for a layer norm.
        eps: Of the norm.
        offset: Added to its weight.
        gain: Its weight, `(I,)`, or None.
        shift: Its bias, `(I,)`, of a layer norm; or None.
        activation: A number of `ops.activation.KINDS`, -1 for none.
        gated: The matrix is `[gate | up]`.
        residual: `(T, O)` or, where gated, `(T, O / 2)`; or None.
        factor: Multiplies what is added to the residual.
        lets: Whether the next kernel, which takes little room, may come in while this one runs.
    """

    norm: int = 0
    eps: float = 0.0
    offset: float = 0.0
    gain: Tensor | None = None
    shift: Tensor | None = None
    activation: int = -1
    gated: bool = False
    residual: Tensor | None = None
    factor: float = 1.0
    lets: bool = False


def planes_of(planes: list[Tensor], kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, second and third plane and multipliers of rows; what a format lacks is never read."""
    codes = planes[0].view(torch.uint8) if kind == 1 else planes[0]
    second = planes[1] if kind >= 3 else codes
    third = planes[2] if kind == 3 or kind >= 5 else codes
    return codes, second, third, codes if kind == 0 else planes[-1]
