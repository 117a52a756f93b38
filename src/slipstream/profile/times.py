"""Times the calls of a model and of its layers, with the wall clock or CUDA events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.devices import Device

__all__ = ["Profile"]

_MODEL = ""


@dataclass
class Profile:
    """Collects call times by name; the model itself has the name "".

    Attributes:
        device: The device, synchronized around each timed call unless events are used.
        events: Use CUDA events, which do not stall the GPU; False if the device is not a GPU.
    """

    device: Device
    events: bool
    _spans: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events = self.events and self.device.name == "cuda"

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Time the body of the context."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((start, self._now()))

    def _now(self) -> Any:
        if self.events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        self.device.synchronize()
        return time.perf_counter()

    def watch(self, module: nn.Module, name: str) -> None:
        """Time every forward of a module under a name; with concurrent threads the times are unreliable."""
        starts: list[Any] = []
        # Bound methods, so that a deep copy of an engine reports to its own profile, not to the original's.
        module.register_forward_pre_hook(partial(self._enter, starts))
        module.register_forward_hook(partial(self._leave, starts, name), always_call=True)

    def _enter(self, starts: list[Any], module: nn.Module, args: Any) -> None:
        starts.append(self._now())

    def _leave(self, starts: list[Any], name: str, module: nn.Module, args: Any, output: Any) -> None:
        if starts:
            self._spans.setdefault(name, []).append((starts.pop(), self._now()))

    def read(self, name: str = _MODEL) -> list[float]:
        """Return the milliseconds of each call under a name since the last reading, and clear them."""
        return self._milliseconds(self._spans.pop(name, []))

    def _milliseconds(self, spans: list[Any]) -> list[float]:
        if self.events and spans:
            self.device.synchronize()
            return [start.elapsed_time(end) for start, end in spans]
        return [1e3 * (end - start) for start, end in spans]

    def read_layers(self) -> dict[str, list[float]]:
        """Return the milliseconds of each call since the last reading, by layer, and clear them."""
        return {name: self.read(name) for name in list(self._spans) if name != _MODEL}

    def peek_layers(self) -> dict[str, list[float]]:
        """Return what `read_layers` does, without clearing."""
        known = list(self._spans.items())  # other threads may add names meanwhile
        return {name: self._milliseconds(list(spans)) for name, spans in known if name != _MODEL}
