"""What an engine needs of a device beside torch's own operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Device", "Lane", "MemoryUse"]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on a device.

    Attributes:
        used: By this process now.
        peak: By this process at most, since `reset_peak` (or since it started, where that cannot be reset).
        total: Of the device.
    """

    used: int
    peak: int
    total: int


class Lane:
    """Copies into one buffer of a device, beside what the device computes; here, where it does one at a time.

    Whoever fills the buffer calls `copy`, whoever reads it `arrive` before and `leave` after it has launched
    what reads.
    """

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy, once everything that was launched before the last `leave` has run."""
        target.copy_(source)

    def finish(self) -> None:
        """Wait until the copies have arrived, so that their sources may be written to."""

    def arrive(self) -> None:
        """What is launched from now on runs after the copies."""

    def leave(self) -> None:
        """The next copy waits for what was launched until now."""


class Device(ABC):
    """One kind of device: its memory, its clock, and whether a step can be captured on it."""

    name: str
    """What the report and the configuration call it."""

    joins_rows: bool = False
    """Whether the rows of q, k and v (of gate and up) are joined at load, so that one launch serves all."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where tensors of this device live."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was launched has run."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Memory now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak, where the device can."""

    def multiplies_fp8(self) -> bool:
        """Whether it has products of two fp8 matrices."""
        return False

    def lane(self) -> Lane:
        """A lane for one buffer."""
        return Lane()

    @abstractmethod
    def random_state(self) -> Tensor:
        """State of torch's default generator here."""

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Go back to a state."""

    @abstractmethod
    def no_graph(self) -> str | None:
        """Why a step cannot be captured and replayed here, or None where it can."""

    @abstractmethod
    def capture(self, run: Callable[[], Any], static: Sequence[Tensor] | None = None) -> Callable[[], Any]:
        """Capture a function of no arguments over static tensors, after three runs that warm up.

        Args:
            run: Reads and writes tensors that stay where they are.
            static: All of these tensors. A device that can tell refuses to read any other.

        Returns:
            A function that repeats it and returns the same tensors, refilled.

        Raises:
            UnsupportedError: This device captures nothing.
            DeviceError: The function does what no capture allows.
        """
