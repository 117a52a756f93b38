"""Times of the model and of its layers: milliseconds, one entry for every run, cleared by reading."""

from __future__ import annotations

import copy
import time

import pytest
import torch

import slipstream
from slipstream.model.block.block import Block
from slipstream.model.frame.run_stack import run_stack
from tests.helpers.models import inject, make, prompt


@pytest.fixture(scope="module")
def made() -> slipstream.InferenceEngine:
    return inject(make("llama"))


@pytest.fixture
def engine(made: slipstream.InferenceEngine) -> slipstream.InferenceEngine:
    twin = copy.deepcopy(made)
    twin.profile_model_time()
    return twin


def test_times_must_be_asked_for_first(made: slipstream.InferenceEngine) -> None:
    for read in (made.model_times, made.layer_times):
        with pytest.raises(slipstream.UnsupportedError, match="profile_model_time"):
            read()
    assert made.report().times == {}


def test_one_entry_for_every_forward_and_reading_clears(engine: slipstream.InferenceEngine) -> None:
    for _ in range(3):
        engine(input_ids=prompt())
    times = engine.model_times()
    assert len(times) == 3 and all(isinstance(t, float) and t > 0 for t in times)
    assert engine.model_times() == []


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beams": 2}, {"use_cache": False}], ids=str
)
def test_five_tokens_make_five_entries_on_every_road(
    engine: slipstream.InferenceEngine, options: dict
) -> None:
    engine.generate(input_ids=prompt(), max_new_tokens=5, eos_token_id=None, **options)
    assert len(engine.model_times()) == 5
    assert {name: len(times) for name, times in engine.layer_times().items()} == {
        "model.layers.0": 5,
        "model.layers.1": 5,
    }
    assert engine.layer_times() == {}


def test_times_are_milliseconds_and_the_layers_are_within_the_model(
    engine: slipstream.InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Block.__call__

    def slow(self: Block, *args: object, **kwargs: object) -> torch.Tensor:
        time.sleep(0.01)
        return run(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Block, "__call__", slow)
    # A native stack runs no block's own code: the layers are slowed one by one.
    monkeypatch.setattr(engine._built.runner, "stack", run_stack)
    for call in (
        lambda: engine(input_ids=prompt()),
        lambda: engine.generate(input_ids=prompt(), max_new_tokens=1),
    ):
        call()
        (whole,) = engine.model_times()
        layers = [time for times in engine.layer_times().values() for time in times]
        assert len(layers) == 2 and all(10 <= t < 1000 for t in layers)
        assert 20 <= sum(layers) <= whole < 1000


def test_a_forward_that_fails_is_timed_once_and_disturbs_nothing(engine: slipstream.InferenceEngine) -> None:
    with pytest.raises((AttributeError, TypeError)):
        engine.module(input_ids=prompt(), attention_mask="no mask")  # type: ignore[arg-type]
    engine.model_times()
    engine(input_ids=prompt())
    assert len(engine.model_times()) == 1


def test_profiling_twice_is_profiling_once(engine: slipstream.InferenceEngine) -> None:
    engine.profile_model_time(use_cuda_events=False)
    engine(input_ids=prompt())
    assert len(engine.model_times()) == 1


def test_a_copy_of_a_profiled_engine_keeps_its_own_times(engine: slipstream.InferenceEngine) -> None:
    twin = copy.deepcopy(engine)
    twin(input_ids=prompt())
    twin.generate(input_ids=prompt(), max_new_tokens=2, eos_token_id=None)
    assert engine.model_times() == [] and len(twin.model_times()) == 3


def test_an_engine_without_fused_layers_is_profiled_too() -> None:
    engine = slipstream.init_inference(make("llama"), dtype=torch.float32)
    engine.profile_model_time()
    engine.generate(input_ids=prompt(), max_new_tokens=5, eos_token_id=None)
    assert len(engine.model_times()) == 5
    assert all(len(times) == 5 for times in engine.layer_times().values())


def test_the_report_has_a_column_of_times(engine: slipstream.InferenceEngine) -> None:
    engine.generate(input_ids=prompt(), max_new_tokens=3, eos_token_id=None)
    report = engine.report()
    assert set(report.times) == {"model.layers.0", "model.layers.1"} and all(
        t > 0 for t in report.times.values()
    )
    assert " ms" in str(report).splitlines()[1]
    assert len(engine.layer_times()["model.layers.0"]) == 3, "the report cleared the times"
    assert "times" not in report.to_dict()
