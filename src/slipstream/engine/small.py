"""Small forwards of text models whose layers run in one native call: torch's part stays on this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.model.around import MOST_ROWS
from slipstream.model.block import Block
from slipstream.model.defer import Encoder

__all__ = ["Small"]


@dataclass(frozen=True)
class Small:
    """Which forwards of an engine leave torch nothing that two threads would do sooner.

    Attributes:
        together: Every layer of the model runs in the native call.
        causal: A forward keeps a cache unless it is told not to, and its layers then run one by one.
        alone: Within, torch uses no other thread.
    """

    together: bool = False
    causal: bool = True
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
        together = encoder is not None and len(blocks) == layers and all(map(encoder.has, blocks))
        return cls(together, any(block.spec.causal for block in blocks), alone)

    def scope(self, given: Mapping[str, Any]) -> AbstractContextManager[None]:
        """What a forward with these arguments, by name or by place, runs within."""
        ids = given.get("input_ids", given.get("0"))
        if (
            self.together
            and isinstance(ids, Tensor)
            and 0 < ids.numel() <= MOST_ROWS
            and not ids.is_floating_point()
            and not (self.causal and given.get("use_cache") is not False)
        ):
            return self.alone()
        return nullcontext()
