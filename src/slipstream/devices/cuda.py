"""One CUDA GPU, through torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.devices.device import Device, Lane, MemoryUse
from slipstream.errors import DeviceError

__all__ = ["CudaDevice"]


class CudaLane(Lane):
    """Copies on a separate stream; page-locked sources are copied while kernels run."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Store the stream, which all lanes of the device share: one copy at a time gets the whole bus."""
        self._stream = stream
        self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Launch the copy, to run after the kernels that read the buffer."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)

    def finish(self) -> None:
        """Wait on the host until the copies are done."""
        self._copied.synchronize()

    def arrive(self) -> None:
        """Make the compute stream wait for the copies."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def leave(self) -> None:
        """Record an event after everything launched on the compute stream, for the next copy to wait for."""
        self._used.record(torch.cuda.current_stream(self._stream.device))


class CudaDevice(Device):
    """A GPU by its index."""

    name = "cuda"
    joins_rows = True

    def __init__(self, index: int) -> None:
        """Select the GPU.

        Raises:
            DeviceError: There is no such GPU.
        """
        count = torch.cuda.device_count()
        if index >= count:
            raise DeviceError(
                f"GPU {index} was requested, but this machine has {count}; start fewer processes on it"
            )
        self._device = torch.device("cuda", index)
        self._copies: torch.cuda.Stream | None = None
        self._pool: Any = None  # graphs of one device never run concurrently, so they share a memory pool
        self._side: Any = None  # captures share a stream, and with it the libraries' workspaces

    @property
    def torch_device(self) -> torch.device:
        """The GPU."""
        return self._device

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def memory(self) -> MemoryUse:
        """Return the memory that torch's allocator has given out on the GPU."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        return MemoryUse(
            torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device), total
        )

    def reset_peak(self) -> None:
        """Reset the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def multiplies_fp8(self) -> bool:
        """Whether the compute capability is at least 8.9."""
        return torch.cuda.get_device_capability(self._device) >= (8, 9)

    def lane(self) -> Lane:
        """Return a lane on the device's one copy stream."""
        if self._copies is None:
            self._copies = torch.cuda.Stream(self._device)
        return CudaLane(self._copies)

    def random_state(self) -> Tensor:
        """Return seed and offset of the GPU's generator; they are on the host, so there is no wait."""
        return torch.cuda.get_rng_state(self._device)

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the GPU's default generator."""
        torch.cuda.set_rng_state(state, self._device)

    def no_graph(self) -> str | None:
        """Return None: every GPU that torch supports can capture graphs."""
        return None

    def capture(self, run: Callable[[], Any], static: Sequence[Tensor] | None = None) -> Callable[[], Any]:
        """Capture a CUDA graph after three runs on a side stream, which set up workspaces and handles.

        Raises:
            DeviceError: The function does something that a capture forbids; has CUDA's own message.
        """
        with torch.cuda.device(self._device):
            if self._side is None:
                self._side, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
            side, graph, before = self._side, torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            side.wait_stream(before)
            with torch.cuda.stream(side):
                for _ in range(3):
                    run()
            before.wait_stream(side)
            try:
                # Other threads may allocate on the GPU meanwhile, without breaking the capture.
                mode: dict[str, Any] = {
                    "pool": self._pool,
                    "stream": side,
                    "capture_error_mode": "thread_local",
                }
                with torch.cuda.graph(graph, **mode):
                    outputs = run()
            except RuntimeError as error:
                # A failed capture leaves its stream as the current one, and its memory pool marked as being
                # recorded to, so that no later capture could share it.
                torch.cuda.set_stream(before)
                self._side = self._pool = None
                raise DeviceError(
                    f"the step cannot be captured ({_first(error)}); leave enable_cuda_graph at False"
                ) from error

        return _Replay(graph, outputs, (run, tuple(static or ())))


@dataclass(frozen=True)
class _Replay:
    """A captured graph, with references that keep the memory it reads alive: it only has addresses itself.

    Attributes:
        graph: The graph to replay.
        outputs: Its results, in the memory that each replay writes to.
        reads: The captured function, with what it closes over, and its static input tensors.
    """

    graph: Any
    outputs: Any
    reads: tuple[Any, ...]

    def __call__(self) -> Any:
        self.graph.replay()
        return self.outputs


def _first(error: BaseException) -> str:
    """Return the first line of the original error: ending a failed capture raises another one."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).partition("\n")[0]
