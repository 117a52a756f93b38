"""Elementwise helpers of a block: constant factors, growing queries, attention gates, clamping to float16.

Shapes: T packed tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.spec import Gate, Growth

__all__ = ["Turning", "growing", "growth", "in_range", "multiplied", "opened"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Turning:
    """An `Attend` that can itself rotate queries and keys while it writes the cache.

    Attributes:
        turned: Attends with unrotated q, k and v, and the table to rotate q and k by; with None in place of
            the table, they are already rotated.
    """

    turned: Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None], Tensor]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries and keys that are already rotated."""
        return self.turned(q, k, v, None)


def multiplied(x: Tensor, factor: float) -> Tensor:
    """Return `x * factor`, which is `x` itself where the factor is 1."""
    return x if factor == 1.0 else x * factor


def growth(spec: Growth, positions: Tensor) -> Tensor:
    """Return the factors of queries at positions `(T,)`, `(T,)` float32."""
    steps = torch.floor((positions.float() + spec.offset) / spec.period)
    return 1.0 + spec.slope * torch.log1p(steps)


def growing(attend: Attend, spec: Growth, positions: Tensor) -> Attend:
    """Wrap an attention so that it scales queries by position."""
    factors = growth(spec, positions)[:, None, None]
    return lambda q, k, v: attend((q * factors).to(q.dtype), k, v)


def opened(opening: Tensor, gate: Gate, attended: Tensor) -> Tensor:
    """Compute a gate's factors, `(T, H, D | 1)`, from its projected rows `(T, H * D | H)`."""
    opening = opening.float()
    factors = torch.sigmoid(opening) if gate.activation == "sigmoid" else F.softplus(opening)
    by_head: Tensor = factors.to(attended.dtype).unflatten(-1, (attended.shape[1], -1))
    return by_head


def in_range(x: Tensor) -> Tensor:
    """Clamp float16 values to the dtype's range, or 1000 short of it if any is infinite or NaN."""
    if x.dtype != torch.float16:
        return x
    largest = torch.finfo(x.dtype).max
    bound = torch.where(x.isfinite().all(), largest, largest - 1000)
    return x.clamp(-bound, bound)
