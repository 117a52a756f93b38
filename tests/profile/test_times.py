"""`Profile` counts every call, of the model and of each layer, whatever happens inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from slipstream.devices import CpuDevice
from slipstream.profile.times import Profile


@pytest.fixture
def profile() -> Profile:
    return Profile(CpuDevice(), events=True)


def test_events_are_for_gpus(profile: Profile) -> None:
    assert profile.events is False


def test_every_call_is_one_entry_and_reading_clears(profile: Profile) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    profile.watch(model, "")
    profile.watch(model[0], "0")
    for _ in range(3):
        model(torch.zeros(1, 2))
    assert len(profile.read()) == 3
    assert profile.read() == []
    layers = profile.read_layers()
    assert {name: len(times) for name, times in layers.items()} == {"0": 3}
    assert profile.read_layers() == {}


def test_peeking_does_not_clear(profile: Profile) -> None:
    for name in ("", "layer"):
        with profile.timer(name):
            pass
    assert profile.peek_layers() == profile.peek_layers() != {}
    assert len(profile.read_layers()["layer"]) == 1
    assert len(profile.read()) == 1


def test_peeking_while_another_thread_times_a_new_name(profile: Profile) -> None:
    class Spans(list[tuple[float, float]]):
        def __iter__(self) -> Iterator[tuple[float, float]]:
            profile._spans["another thread's"] = []
            return super().__iter__()

    profile._spans["layer"] = Spans([(1.0, 1.5)])
    assert profile.peek_layers() == {"layer": [500.0]}


def test_a_block_that_raises_is_timed_and_the_next_one_is_its_own(profile: Profile) -> None:
    with pytest.raises(KeyError), profile.timer("x"):
        raise KeyError
    with profile.timer("x"):
        pass
    assert len(profile.read("x")) == 2


def test_a_forward_that_raises_does_not_shift_the_times_of_later_ones(profile: Profile) -> None:
    layer = nn.Linear(2, 2)
    profile.watch(layer, "layer")
    with pytest.raises(RuntimeError):
        layer(torch.zeros(1, 3))
    layer(torch.zeros(1, 2))
    times = profile.read("layer")
    assert times
    assert all(time >= 0 for time in times)


def test_times_are_milliseconds(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 10.25])
    monkeypatch.setattr("slipstream.profile.times.time.perf_counter", lambda: next(ticks))
    with profile.timer("x"):
        pass
    assert profile.read("x") == [250.0]
