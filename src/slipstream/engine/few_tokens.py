"""Forwards of a few tokens, in which torch does its part of the work on the calling thread only.

Torch's threads gain nothing there. Where layers run one by one, as they do with a cache, the threads that
torch leaves spinning after each small operation also keep the native library's threads off the processors: a
step of 10 layers of 576 channels takes 10 ms without them, and 14 ms with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.model.block.block import Block
from slipstream.model.frame.outer_linears import MOST_ROWS
from slipstream.model.fused.chain import Encoder

__all__ = ["Small"]


@dataclass(frozen=True)
class Small:
    """Decides which forwards of an engine are small, and runs them on one torch thread.

    Attributes:
        together: Whether the native library supports every layer of the model.
        alone: Makes a context in which torch uses only the calling thread.
    """

    together: bool = False
    alone: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def of(
        cls,
        encoder: Encoder | None,
        blocks: Iterable[Block],
        layers: int,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> Small:
        """Make the instance for an engine that has these blocks among `layers` layers."""
        blocks = list(blocks)
        return cls(encoder is not None and len(blocks) == layers and all(map(encoder.has, blocks)), alone)

    def scope(self, given: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return the context for a forward with these arguments, by name or by position ("0")."""
        ids = given.get("input_ids", given.get("0"))
        if not self.together or not isinstance(ids, Tensor) or ids.is_floating_point():
            return nullcontext()
        return self.alone() if 0 < ids.numel() <= MOST_ROWS else nullcontext()
