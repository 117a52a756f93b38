"""Forwards of a few tokens, in which torch's part of the work stays on this thread.

Its threads gain nothing there, and where layers run one by one, as they do upon a cache, those that it leaves
spinning after each small operation keep the library's from the processors: a step of 10 layers of 576
channels takes 10 ms alone, and 14 beside them.
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
    """Which forwards of an engine these are.

    Attributes:
        together: Every layer of the model is one that the library knows.
        alone: Within, torch uses no other thread.
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
        """Of an engine's blocks, where `layers` were looked at."""
        blocks = list(blocks)
        return cls(encoder is not None and len(blocks) == layers and all(map(encoder.has, blocks)), alone)

    def scope(self, given: Mapping[str, Any]) -> AbstractContextManager[None]:
        """What a forward with these arguments, by name or by place, runs within."""
        ids = given.get("input_ids", given.get("0"))
        if not self.together or not isinstance(ids, Tensor) or ids.is_floating_point():
            return nullcontext()
        return self.alone() if 0 < ids.numel() <= MOST_ROWS else nullcontext()
