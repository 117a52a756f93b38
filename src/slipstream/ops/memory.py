"""Passes over whole tensors that a device may have a faster way for than torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["TORCH", "Passes"]


@dataclass(frozen=True)
class Passes:
    """What each does, or declines, and then torch does it.

    Attributes:
        copied: Copies the first tensor into the second, which has its shape; whether it did.
        is_finite: Whether a tensor has neither NaN nor infinity; None where it did not look.
    """

    copied: Callable[[Tensor, Tensor], bool]
    is_finite: Callable[[Tensor], bool | None]


def _not_copied(source: Tensor, target: Tensor) -> bool:
    return False


def _not_looked(tensor: Tensor) -> bool | None:
    return None


TORCH = Passes(_not_copied, _not_looked)
