"""The randomness of sampling: exponential noise from torch's default generator, as in `torch.multinomial`.

Shapes: B batch, R rows of the batch whose tokens are drawn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Noise", "RowNoise", "exponential"]


def exponential(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the next noise of a device's default generator: float32, exponential with mean 1."""
    return torch.empty(tuple(shape), device=device, dtype=torch.float32).exponential_()


class Noise:
    """Noise for the next tokens of a batch.

    Every row has its own noise, whether it is finished or not, so that a seed gives the same tokens as
    transformers' loops.

    Attributes:
        shape: B and V.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        """Store the shape; no noise is generated yet."""
        self.shape, self._device = (batch, vocabulary), device
        self._start: Tensor | None = None
        self._first: Tensor | None = None

    def start(self) -> Tensor:
        """Return the state of the CPU's generator before the first noise, as it was at the first call."""
        if self._start is None:
            self._start = torch.get_rng_state()
        return self._start

    def first(self) -> Tensor:
        """Return the noise of the next token, `(B, V)` float32: the same in every call.

        Rows may reach their first draw one by one.
        """
        if self._first is None:
            if self._device.type == "cpu":
                torch.set_rng_state(self.start())
            self._first = self.another()
        return self._first

    def another(self) -> Tensor:
        """Return the noise of one more token, `(B, V)` float32."""
        return exponential(self.shape, self._device)

    def of(self, rows: Sequence[int]) -> RowNoise:
        """Return the noise of some of the rows."""
        return RowNoise(self, rows)


class RowNoise:
    """The noise of some rows of a batch.

    Attributes:
        whole: The noise of the whole batch.
        rows: Indices of the rows (R).
    """

    def __init__(self, whole: Noise, rows: Sequence[int]) -> None:
        """Begin with the next token."""
        self.whole, self.rows, self._has_begun = whole, rows, False

    @property
    def batch(self) -> int:
        """The number of rows of the batch (B)."""
        return self.whole.shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether the rows are all rows of the batch, in order."""
        return len(self.rows) == self.batch

    def __call__(self) -> Tensor:
        """Return the noise of the next token, `(R, V)` float32; each call advances by one token."""
        noise = self.whole.another() if self._has_begun else self.whole.first()
        self._has_begun = True
        return noise if self.is_whole else noise[list(self.rows)]
