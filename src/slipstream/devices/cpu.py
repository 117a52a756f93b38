"""The CPU as a device."""

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
    """Return the peak of resident memory in bytes."""
    with contextlib.suppress(OSError):
        # Preferred to getrusage, whose peak is never below that of the process that started this one.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class CpuDevice(Device):
    """The CPU: everything is synchronous, and memory is the process's resident memory."""

    name = "cpu"

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def memory(self) -> MemoryUse:
        """Return resident memory; the peak is since `reset_peak` on Linux, elsewhere since process start."""
        return MemoryUse(psutil.Process().memory_info().rss, _peak(), psutil.virtual_memory().total)

    def reset_peak(self) -> None:
        """Reset the peak on Linux; elsewhere the system keeps one peak per process.

        Source: https://docs.kernel.org/filesystems/proc.html, `clear_refs`: 5 resets `VmHWM`.
        """
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def random_state(self) -> Tensor:
        """Return the state of the CPU's default generator."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the CPU's default generator."""
        torch.set_rng_state(state)

    def no_graph(self) -> str | None:
        """Return the reason that holds for every CPU: without launches a graph would save nothing."""
        return "the CPU launches nothing that a graph could save"

    def capture(self, run: Callable[[], Any], static: Sequence[Tensor] | None = None) -> Callable[[], Any]:
        """Refuse to capture.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("graphs cannot be captured on the CPU; leave enable_cuda_graph at False")
