"""The host's processor."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from slipstream.devices.device import Device, MemoryUse
from slipstream.errors import UnsupportedError

__all__ = ["CpuDevice"]


def _peak() -> int:
    """Most bytes that were resident."""
    with contextlib.suppress(OSError):
        # What getrusage says is at least the peak of the process that started this one.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class CpuDevice(Device):
    """Synchronous, with the process's resident memory."""

    name = "cpu"

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def memory(self) -> MemoryUse:
        """Resident memory; its peak is since `reset_peak` on Linux, elsewhere since the process started."""
        return MemoryUse(psutil.Process().memory_info().rss, _peak(), psutil.virtual_memory().total)

    def reset_peak(self) -> None:
        """Start a new peak, on Linux; elsewhere the system keeps one per process.

        Source: https://docs.kernel.org/filesystems/proc.html, `clear_refs`: 5 resets `VmHWM`.
        """
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def random_state(self) -> Tensor:
        """Of the generator of the CPU."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Of the generator of the CPU."""
        torch.set_rng_state(state)

    def no_graph(self) -> str | None:
        """There is nothing to launch, so nothing to capture."""
        return "the CPU launches nothing that a graph could save"

    def capture(self, run: Callable[[], Any], static: Sequence[Tensor] | None = None) -> Callable[[], Any]:
        """Refuse.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("graphs cannot be captured on the CPU; leave enable_cuda_graph at False")
