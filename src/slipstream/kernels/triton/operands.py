"""A matrix as the kernels take it, and what precedes and follows it in a layer.

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
        kind: Number of the weight format in `decode.FORMATS`.
        blocks: Blocks of 32 inputs per group of the format.
        outputs: O.
    """

    planes: list[Tensor]
    bias: Tensor | None
    kind: int
    blocks: int
    outputs: int


@dataclass(frozen=True)
class Around:
    """The norm before a matrix, and the activation and residual after it.

    Attributes:
        norm: 0 for none, 1 for an RMS norm, 2 for a layer norm.
        eps: The norm's epsilon.
        offset: Added to the norm's weight.
        gain: The norm's weight, `(I,)`, or None.
        shift: The bias of a layer norm, `(I,)`, or None.
        activation: A number of `ops.activation.KINDS`, -1 for none.
        gated: Whether the matrix is `[gate | up]`.
        residual: `(T, O)` or, where gated, `(T, O / 2)`; or None.
        factor: Multiplies what is added to the residual.
        lets: Whether the next kernel, which occupies little of the GPU, may start while this one runs.
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
    """Return codes, second and third plane and row multipliers; codes stand in for what a format lacks."""
    codes = planes[0].view(torch.uint8) if kind == 1 else planes[0]
    second = planes[1] if kind >= 3 else codes
    third = planes[2] if kind == 3 or kind >= 5 else codes
    return codes, second, third, codes if kind == 0 else planes[-1]
