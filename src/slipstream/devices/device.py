"""The interface that an engine needs of a device, besides torch's own operations."""

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
    """Memory of a device, in bytes.

    Attributes:
        used: Used by this process now.
        peak: Maximum used by this process since `reset_peak` (or since it started, if it cannot be reset).
        total: Memory of the device.
    """

    used: int
    peak: int
    total: int


class Lane:
    """Copies into one buffer of a device, concurrently with its computation where the device can.

    This base class is for devices that do one thing at a time. The writer of the buffer calls `copy`. The
    reader calls `arrive` before it launches the work that reads, and `leave` afterwards.
    """

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start a copy that runs after everything that was launched before the last `leave`."""
        target.copy_(source)

    def finish(self) -> None:
        """Wait until the copies are done, so that their sources may be overwritten."""

    def arrive(self) -> None:
        """Make all work that is launched from now on run after the copies."""

    def leave(self) -> None:
        """Make the next copy wait for all work that has been launched so far."""


class Device(ABC):
    """A kind of device: its memory, synchronization, random state, and capture of graphs."""

    name: str
    """The device's name in the report and the configuration."""

    joins_rows: bool = False
    """Whether the rows of q, k and v (of gate and up) are joined at load, so that one launch computes all."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The torch device of its tensors."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was launched has run."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Return the current use of memory."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset the peak of memory, where the device can."""

    def multiplies_fp8(self) -> bool:
        """Whether the device can multiply two fp8 matrices."""
        return False

    def lane(self) -> Lane:
        """Return a lane for one buffer."""
        return Lane()

    @abstractmethod
    def random_state(self) -> Tensor:
        """Return the state of torch's default generator for this device."""

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Set the state of torch's default generator for this device."""

    @abstractmethod
    def no_graph(self) -> str | None:
        """Return why a step cannot be captured and replayed on this device, or None if it can."""

    @abstractmethod
    def capture(self, run: Callable[[], Any], static: Sequence[Tensor] | None = None) -> Callable[[], Any]:
        """Capture a function without arguments over static tensors, after three warm-up runs.

        Args:
            run: A function that reads and writes tensors at fixed addresses.
            static: All of these tensors. A device that is able to check refuses to read any others.

        Returns:
            A function that replays the capture and returns the same tensors, refilled.

        Raises:
            UnsupportedError: This device cannot capture.
            DeviceError: The function does something that a capture forbids.
        """
