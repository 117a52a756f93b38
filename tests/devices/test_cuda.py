"""The order in which a GPU is asked to capture, by stand-ins for torch's classes: no GPU is needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from slipstream.devices.cuda import CudaDevice
from slipstream.errors import DeviceError


class Asked(list[str]):
    """What torch was asked, in order, and the stand-ins that say so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._current, self._made, self.fails = "main", 0, False
        for name in ("Stream", "CUDAGraph", "graph", "stream", "device"):
            patch.setattr(torch.cuda, name, getattr(self, f"_{name}"))
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "current_stream", lambda *_: self._Named(self._current, self))
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "_current", stream.name))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: self._numbered("pool"))

    def _numbered(self, what: str) -> str:
        self._made += 1
        return f"{what} {self._made}"

    class _Named:
        def __init__(self, name: str, asked: Asked) -> None:
            self.name, self._asked = name, asked

        def wait_stream(self, other: Any) -> None:
            self._asked.append(f"{self.name} waits for {other.name}")

        def replay(self) -> None:
            self._asked.append(f"{self.name} is replayed")

    def _Stream(self, device: Any) -> _Named:
        return self._Named("side", self)

    def _CUDAGraph(self) -> _Named:
        return self._Named(self._numbered("graph"), self)

    @contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        self.append(f"on {device}")
        yield

    @contextmanager
    def _stream(self, stream: _Named) -> Iterator[None]:
        before, self._current = self._current, stream.name
        yield
        self._current = before

    @contextmanager
    def _graph(self, graph: _Named, pool: str, stream: _Named, capture_error_mode: str) -> Iterator[None]:
        before, self._current = (
            self._current,
            f"{graph.name} in {pool} by {stream.name}, {capture_error_mode}",
        )
        try:
            yield
        finally:
            if self.fails:  # as torch does: the stream that was current before stays away
                raise RuntimeError("the end of a capture that failed")
            self._current = before

    def run(self) -> str:
        """What is captured."""
        self.append(f"run: {self._current}")
        if self.fails and "graph" in self._current:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return "outputs"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def test_three_runs_on_a_side_stream_come_before_a_capture(asked: Asked) -> None:
    replay = CudaDevice(1).capture(asked.run)
    assert asked == [
        "on cuda:1",
        "side waits for main",
        *["run: side"] * 3,
        "main waits for side",
        "run: graph 2 in pool 1 by side, thread_local",
    ]
    asked.clear()
    assert replay() == "outputs"
    assert asked == ["graph 2 is replayed"]


def test_graphs_of_one_device_share_stream_and_memory(asked: Asked) -> None:
    device = CudaDevice(0)
    device.capture(asked.run)
    device.capture(asked.run)
    assert [row for row in asked if "in pool" in row] == [
        "run: graph 2 in pool 1 by side, thread_local",
        "run: graph 3 in pool 1 by side, thread_local",
    ]


def test_what_cannot_be_captured_is_told_in_the_words_of_what_failed_first(asked: Asked) -> None:
    asked.fails = True
    with pytest.raises(DeviceError, match=r"\(operation not permitted when stream is capturing\)"):
        CudaDevice(0).capture(asked.run)


def test_after_a_capture_that_failed_others_succeed_upon_the_stream_of_before(asked: Asked) -> None:
    device = CudaDevice(0)
    asked.fails = True
    with pytest.raises(DeviceError):
        device.capture(asked.run)
    asked.fails = False
    asked.clear()
    device.capture(asked.run)
    # Another pool: the one of the capture that failed is never given back.
    assert "side waits for main" in asked and asked[-1].startswith("run: graph 4 in pool 3 by side")


def test_a_gpu_that_is_not_there_is_named(asked: Asked) -> None:
    with pytest.raises(DeviceError, match="GPU 2 was requested, but this machine has 2"):
        CudaDevice(2)


def test_a_graph_keeps_what_its_function_reads(asked: Asked) -> None:
    own = torch.zeros(3)
    kept = weakref.ref(own)

    def capture(tensor: torch.Tensor) -> Any:
        return CudaDevice(0).capture(lambda: tensor.add_(1))

    replay = capture(own)
    del own
    gc.collect()
    assert kept() is not None
    del replay
    gc.collect()
    assert kept() is None
