"""Passes over whole tensors for which a device may have faster implementations than torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["TORCH", "Passes"]


@dataclass(frozen=True)
class Passes:
    """The implementations of a device; each may decline a tensor, which torch then processes.

    Attributes:
        copied: Copies the first tensor into the second, which has the same shape; returns whether it did.
        is_finite: Returns whether a tensor has neither NaN nor infinity; None if it declines.
    """

    copied: Callable[[Tensor, Tensor], bool]
    is_finite: Callable[[Tensor], bool | None]


def _not_copied(source: Tensor, target: Tensor) -> bool:
    return False


def _not_looked(tensor: Tensor) -> bool | None:
    return None


TORCH = Passes(_not_copied, _not_looked)
