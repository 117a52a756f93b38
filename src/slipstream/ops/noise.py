"""The chance in drawing: exponential noise of torch's default generator, as `torch.multinomial` asks for it.

Shapes: B batch, R those of its rows whose tokens are drawn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Noise", "RowNoise", "exponential"]


def exponential(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return what torch's default generator of a device makes next: float32, exponential with mean 1."""
    return torch.empty(tuple(shape), device=device, dtype=torch.float32).exponential_()


class Noise:
    """Noise for the next tokens of a batch.

    Every row has its own, be it finished or not: a seed means the same to transformers' loops.

    Attributes:
        shape: B and V.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        """Make nothing yet."""
        self.shape, self._device = (batch, vocabulary), device
        self._start: Tensor | None = None
        self._first: Tensor | None = None

    def start(self) -> Tensor:
        """State of the CPU's generator before the first of it: as it is when this is asked first."""
        if self._start is None:
            self._start = torch.get_rng_state()
        return self._start

    def first(self) -> Tensor:
        """Of the next token, `(B, V)` float32: the same whoever asks, for rows may get there one by one."""
        if self._first is None:
            if self._device.type == "cpu":
                torch.set_rng_state(self.start())
            self._first = self.another()
        return self._first

    def another(self) -> Tensor:
        """Of one more token, `(B, V)` float32."""
        return exponential(self.shape, self._device)

    def of(self, rows: Sequence[int]) -> RowNoise:
        """What some of the rows see of it."""
        return RowNoise(self, rows)


class RowNoise:
    """What some rows of a batch see of its noise.

    Attributes:
        whole: That of the batch.
        rows: Which ones they are (R).
    """

    def __init__(self, whole: Noise, rows: Sequence[int]) -> None:
        """Begin with the next token."""
        self.whole, self.rows, self._has_begun = whole, rows, False

    @property
    def batch(self) -> int:
        """Rows of the batch (B)."""
        return self.whole.shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether they are all of the batch, in order."""
        return len(self.rows) == self.batch

    def __call__(self) -> Tensor:
        """Of the next token, then of the one after it, `(R, V)` float32."""
        made = self.whole.another() if self._has_begun else self.whole.first()
        self._has_begun = True
        return made if self.is_whole else made[list(self.rows)]
