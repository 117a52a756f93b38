"""One CUDA GPU, through torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.devices.device import Device, Lane, MemoryUse
from slipstream.errors import DeviceError

__all__ = ["CudaDevice"]


class CudaLane(Lane):
    """Copies on a stream of their own; page-locked sources are copied while kernels run."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Share the stream with the device's other lanes: one copy at a time has all of the bus."""
        self._stream = stream
        self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Launch the copy behind the kernels that read the buffer."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)

    def finish(self) -> None:
        """Wait for the event behind the copies."""
        self._copied.synchronize()

    def arrive(self) -> None:
        """Let the stream that computes wait for that event."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def leave(self) -> None:
        """Put an event behind what was launched."""
        self._used.record(torch.cuda.current_stream(self._stream.device))


class CudaDevice(Device):
    """A GPU by its index."""

    name = "cuda"
    joins_rows = True

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
        self._copies: torch.cuda.Stream | None = None
        self._pool: Any = None  # graphs of one device never run at once: they share their memory

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

    def lane(self) -> Lane:
        """On the one stream for copies."""
        if self._copies is None:
            self._copies = torch.cuda.Stream(self._device)
        return CudaLane(self._copies)

    def no_graph(self) -> str | None:
        """Every GPU that torch supports can."""
        return None

    def capture(self, run: Callable[[], Any], static: Sequence[Tensor] | None = None) -> Callable[[], Any]:
        """Capture a CUDA graph after three runs on a side stream, which set up workspaces and handles.

        Raises:
            DeviceError: The function does what no capture allows, with CUDA's own words.
        """
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = run()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise DeviceError(
                f"the step cannot be captured ({reason}); leave enable_cuda_graph at False"
            ) from error

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay
