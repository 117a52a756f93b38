"""A device that captures and replays graphs as plain calls, so that graph logic is tested everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.devices.cpu import CpuDevice

__all__ = ["NullDevice"]


class NullDevice(CpuDevice):
    """The CPU, pretending that a captured step is cheaper."""

    name = "null"

    def no_graph(self) -> str | None:
        """Nothing stands in the way."""
        return None

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Run once, as a capture does, and hand the function back."""
        run()
        return run
