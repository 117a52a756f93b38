"""The keys and values that a decoder's layers cross-attend to, made once per generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["EncoderStates"]


@dataclass(frozen=True)
class EncoderStates:
    """The cross-attention inputs of a decoder, with one item per layer in each sequence.

    Shapes: B batch, M encoder states, K kv heads, H heads, D head dim, L positions that a generation may
    reach.

    Attributes:
        keys: Keys of the encoder states, `(B, K, M, D)` contiguous, by layer.
        values: Values of the encoder states, `(B, K, M, D)` contiguous, by layer.
        seen: `(B,)` int32, how many states each sequence sees, counted from the first; None for all.
        relatives: The bias of self-attention scores by relative position, by layer: `(H, L)` float32, indexed
            by how many tokens the key is before its query; None for no bias.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    seen: Tensor | None
    relatives: Sequence[Tensor | None]
