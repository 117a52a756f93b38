"""A block's small arithmetic: what multiplies queries, by position, and the attention's answer, by a gate.

Shapes: T packed tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.spec import Gate, Growth

__all__ = ["Turning", "growing", "growth", "in_range", "opened"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Turning:
    """A road's attention that can rotate queries and keys itself, on their way into its cache.

    Attributes:
        turned: The attention of q, k and v as they are projected, and the table that turns q and k.
    """

    turned: Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None], Tensor]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries and keys that have been turned."""
        return self.turned(q, k, v, None)


def growth(spec: Growth, positions: Tensor) -> Tensor:
    """What queries at positions `(T,)` are multiplied by, `(T,)` float32."""
    steps = torch.floor((positions.float() + spec.offset) / spec.period)
    return 1.0 + spec.slope * torch.log1p(steps)


def growing(attend: Attend, spec: Growth, positions: Tensor) -> Attend:
    """The same attention of queries that have grown."""
    factors = growth(spec, positions)[:, None, None]
    return lambda q, k, v: attend((q * factors).to(q.dtype), k, v)


def opened(opening: Tensor, gate: Gate, attended: Tensor) -> Tensor:
    """A gate's factors, `(T, H, D | 1)`, of its rows `(T, H * D | H)`."""
    opening = opening.float()
    factors = torch.sigmoid(opening) if gate.activation == "sigmoid" else F.softplus(opening)
    by_head: Tensor = factors.to(attended.dtype).unflatten(-1, (attended.shape[1], -1))
    return by_head


def in_range(x: Tensor) -> Tensor:
    """In float16, where a sum has left the dtype's range, everything brought back into it."""
    if x.dtype != torch.float16:
        return x
    largest = torch.finfo(x.dtype).max
    bound = torch.where(x.isfinite().all(), largest, largest - 1000)
    return x.clamp(-bound, bound)
