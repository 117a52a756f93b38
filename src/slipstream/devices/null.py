"""A device that captures and replays graphs on the CPU, so that graph logic can be tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from slipstream.devices.cpu import CpuDevice
from slipstream.devices.record import NothingIsRead, Recorder

__all__ = ["NullDevice"]


class NullDevice(CpuDevice):
    """The CPU with graphs: it records dispatched operations, and refuses those that a GPU cannot capture."""

    name = "null"
    joins_rows = True

    def multiplies_fp8(self) -> bool:
        """Return True, as for a GPU; torch computes the products in float32."""
        return True

    def no_graph(self) -> str | None:
        """Return None: graphs can always be captured."""
        return None

    def capture(self, run: Callable[[], Any], static: Sequence[Tensor] | None = None) -> Callable[[], Any]:
        """Run as often as a GPU does for warm-up, then record.

        Raises:
            DeviceError: The function does something that a capture forbids.
        """
        for _ in range(3):
            run()
        recorder = Recorder(static)
        with NothingIsRead(), recorder:
            outputs = run()

        def replay() -> Any:
            recorder.replay()
            return outputs

        return replay
