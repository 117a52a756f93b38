"""One CUDA GPU, through torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.devices.device import Device, MemoryUse
from slipstream.errors import DeviceError

__all__ = ["CudaDevice"]


class CudaDevice(Device):
    """A GPU by its index."""

    name = "cuda"

    def __init__(self, index: int) -> None:
        """Take the GPU.

        Raises:
            DeviceError: There is no such GPU.
        """
        count = torch.cuda.device_count()
        if index >= count:
            raise DeviceError(
                f"GPU {index} was asked for and this machine has {count}; start fewer processes on it"
            )
        self._device = torch.device("cuda", index)

    @property
    def torch_device(self) -> torch.device:
        """The GPU."""
        return self._device

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def memory(self) -> MemoryUse:
        """What torch's allocator holds on the GPU."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        return MemoryUse(
            torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device), total
        )

    def reset_peak(self) -> None:
        """Start a new peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def no_graph(self) -> str | None:
        """Every GPU that torch supports can."""
        return None

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a CUDA graph after three runs on a side stream, which set up workspaces and handles."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay
