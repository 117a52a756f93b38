"""The device that captures on the CPU: repeats what was recorded, refuses what a GPU could not capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.devices import NullDevice
from slipstream.errors import DeviceError


def test_a_replay_reads_the_static_tensors_anew() -> None:
    x, weight, cache = torch.ones(3), torch.eye(3), torch.zeros(2, 3)

    def run() -> Tensor:
        y = (weight @ x).view(1, 3).expand(2, 3)
        cache.add_(y)
        return y.sum(0) + 1

    replay = NullDevice().capture(run, [x, weight, cache])
    cache.zero_()
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    first = replay()
    assert first.tolist() == [3.0, 5.0, 7.0]
    assert cache.tolist() == [[1.0, 2.0, 3.0]] * 2
    x.zero_()
    assert replay() is first
    assert first.tolist() == [1.0, 1.0, 1.0]


def test_python_does_not_run_again() -> None:
    calls = []
    replay = NullDevice().capture(lambda: calls.append(1) or torch.ones(1) * len(calls))
    assert replay().tolist() == [4.0]  # three runs to warm up, and the recorded one
    assert replay().tolist() == [4.0]
    assert len(calls) == 4


X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: X.sum().item(), "reads a value back"),
        (lambda: X[X > 1], "reads a value back"),
        (lambda: X.nonzero(), "reads a value back"),
        (lambda: X + 1 if bool((X > 1).any()) else X, "reads a value back"),
        (lambda: X + torch.tensor([1.0, 2.0, 3.0, 4.0]), "Python numbers"),
    ],
)
def test_what_a_capture_forbids_is_refused(run: Callable[[], Tensor], words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        NullDevice().capture(run, [X])


def test_a_tensor_that_may_be_gone_is_refused() -> None:
    with pytest.raises(DeviceError, match="neither static nor made within"):
        NullDevice().capture(lambda: X + 1, [])
    NullDevice().capture(lambda: X + 1)  # nobody said which tensors stay
