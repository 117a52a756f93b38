"""The measuring itself: what is counted, in which order, and what each figure means. Never how fast."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.devices import CpuDevice, MemoryUse
from slipstream.errors import RequestError
from slipstream.profile import bench as module
from slipstream.profile.bench import Shape, Spread, bench, interleave, random_prompt, time_generate


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Speaker:
    """A model that takes `prefill` seconds for the prompt and `step` for each later token."""

    def __init__(self, clock: Clock, prefill: float, step: float, calls: list[str], name: str) -> None:
        self.clock, self.prefill, self.step, self.calls, self.name = clock, prefill, step, calls, name

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        self.calls.append(self.name)
        assert options["attention_mask"].shape == input_ids.shape
        streamer = options["streamer"]
        streamer.put(input_ids)
        new = torch.zeros(input_ids.shape[0], options["max_new_tokens"], dtype=torch.long)
        for index in range(new.shape[1]):
            self.clock.now += self.step if index else self.prefill
            streamer.put(new[:, index])
        streamer.end()
        return torch.cat([input_ids, new], dim=1)


class Memory(CpuDevice):
    """A device whose memory holds 100 bytes, and 130 at most since the last reset."""

    resets = 0

    def memory(self) -> MemoryUse:
        return MemoryUse(100, 130, 1000)

    def reset_peak(self) -> None:
        self.resets += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_run_separates_the_first_token_from_the_others(clock: Clock) -> None:
    device = Memory()
    speaker = Speaker(clock, 2.0, 0.5, [], "a")
    run = time_generate(speaker, torch.zeros(3, 4, dtype=torch.long), device, max_new_tokens=5)
    assert (run.new_tokens, run.first_token, run.seconds) == (5, 2.0, 4.0)
    assert run.ids.shape == (3, 9)
    assert (run.working_bytes, device.resets) == (30, 1)


def test_a_call_that_makes_no_token_is_an_error(clock: Clock) -> None:
    speaker = Speaker(clock, 1.0, 1.0, [], "a")
    with pytest.raises(RequestError, match=r"made no tokens for a prompt of shape \(1, 4\)"):
        time_generate(speaker, torch.zeros(1, 4, dtype=torch.long), Memory(), max_new_tokens=0)


def test_rates_count_all_sequences_of_the_batch(clock: Clock) -> None:
    speaker = Speaker(clock, 2.0, 0.5, [], "a")
    [row] = bench({"a": speaker}, Shape(3, 4, 5), device=Memory(), vocabulary=10, repeat=2)
    assert row.first_token == Spread(2.0, 2.0, 2.0)
    assert row.prefill.median == 3 * 4 / 2.0
    assert row.decode.median == 3 * 4 / (4 * 0.5)
    assert (row.name, row.repeat, row.working_bytes) == ("a", 2, 30)
    assert json.loads(json.dumps(row.to_dict()))["decode"]["median"] == 6.0


def test_models_take_turns_after_they_are_warm(clock: Clock) -> None:
    calls: list[str] = []
    models = {name: Speaker(clock, 1.0, 1.0, calls, name) for name in "ab"}
    rows = bench(models, Shape(1, 2, 2), device=Memory(), vocabulary=10, repeat=3)
    assert "".join(calls) == "ab" + "ab" + "abbaab"
    assert [row.name for row in rows] == ["a", "b"]


def test_interleave_keeps_answers_apart() -> None:
    count = iter(range(100))
    answers = interleave({"a": lambda: next(count), "b": lambda: next(count)}, repeat=2)
    assert answers == {"a": [0, 3], "b": [1, 2]}


def test_a_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 100.0]) == Spread(3.0, 1.0, 100.0)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_prompts_are_the_same_for_the_same_seed_and_within_the_vocabulary() -> None:
    shape = Shape(3, 50, 2)
    ids = random_prompt(shape, 7)
    assert ids.shape == (3, 50)
    assert set(ids.flatten().tolist()) == set(range(7))
    assert torch.equal(ids, random_prompt(shape, 7))
    assert not torch.equal(ids, random_prompt(shape, 7, seed=1))


@pytest.mark.parametrize("shape", [Shape(0, 4, 4), Shape(1, 0, 4), Shape(1, 4, 1)])
def test_a_shape_with_nothing_to_measure_is_refused(clock: Clock, shape: Shape) -> None:
    with pytest.raises(RequestError, match="new_tokens at least 2"):
        bench({"a": Speaker(clock, 1.0, 1.0, [], "a")}, shape, device=Memory(), vocabulary=10)


def test_a_real_model_is_run_to_the_length_asked_for() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=3,  # two of the three tokens end the text
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=[0, 2],
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    lengths = []
    original = model.generate

    def recorded(*args: Any, **options: Any) -> Any:
        out = original(*args, **options)
        lengths.append(out.shape[1])
        return out

    model.generate = recorded
    bench({"model": model}, Shape(2, 3, 20), device=CpuDevice(), vocabulary=3, repeat=1)
    assert lengths == [3, 23, 23]


def test_the_cpus_peak_can_start_anew_on_linux() -> None:
    import sys

    if sys.platform != "linux":
        pytest.skip("only Linux can reset it")
    device = CpuDevice()
    block = torch.ones(64 << 18)  # 64 MiB
    high = device.memory().peak
    del block
    device.reset_peak()
    assert device.memory().peak < high - (32 << 20)
