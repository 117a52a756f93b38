"""A device that captures and replays graphs on the CPU, so that graph logic is tested everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from slipstream.devices.cpu import CpuDevice
from slipstream.devices.record import NothingIsRead, Recorder

__all__ = ["NullDevice"]


class NullDevice(CpuDevice):
    """The CPU, with graphs: it records what is dispatched, and refuses what a GPU could not capture."""

    name = "null"
    joins_rows = True

    def multiplies_fp8(self) -> bool:
        """As a GPU does, by torch in float32."""
        return True

    def no_graph(self) -> str | None:
        """Nothing stands in the way."""
        return None

    def capture(self, run: Callable[[], Any], static: Sequence[Tensor] | None = None) -> Callable[[], Any]:
        """Run as often as a GPU would to warm up, and record.

        Raises:
            DeviceError: The function does what no capture allows.
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
