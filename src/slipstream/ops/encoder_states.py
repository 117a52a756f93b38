"""What the layers of a decoder hear of an encoder, once per generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Heard"]


@dataclass(frozen=True)
class Heard:
    """Of each layer in order.

    Shapes: B batch, M states, K kv heads, H heads, D head dim, L positions that a generation may reach.

    Attributes:
        keys: Of the states, `(B, K, M, D)` contiguous.
        values: Likewise.
        seen: `(B,)` int32, how many states each sequence sees, from the first; None for all.
        relatives: What is added to the scores by distance, `(H, L)` float32, of a key so many tokens before
            its query; None for nothing.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    seen: Tensor | None
    relatives: Sequence[Tensor | None]
