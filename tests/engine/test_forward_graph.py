"""Forwards captured on the device that records: one graph per shape, outputs of their own, reasons told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from slipstream.devices import NullDevice
from tests.helpers.models import Pair, close, make, pair, prompt

GRAPHS: dict[str, Any] = {"enable_cuda_graph": True}


@pytest.fixture(autouse=True)
def _null_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.build.choose", NullDevice)
    # As transformers sees a real capture: it then makes masks without asking the host what is in them.
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)


@pytest.fixture
def bert() -> Pair:
    return pair("bert", settings=GRAPHS)


def captured(both: Pair) -> int:
    return sum(one is not None for one in both.engine._graphs._captured.values())


def test_each_shape_is_captured_once(bert: Pair) -> None:
    for seed in range(3):
        for rows, length in ((1, 4), (2, 9)):
            ids = prompt(rows, length, seed=seed)
            close(bert.original(ids), bert.engine(ids))
            mask = torch.ones_like(ids)
            mask[0, length // 2 :] = 0
            close(bert.original(ids, attention_mask=mask), bert.engine(ids, attention_mask=mask))
    assert captured(bert) == 4
    assert "without a graph" not in str(bert.engine.report())


def test_a_later_call_leaves_earlier_outputs_alone(bert: Pair) -> None:
    first = bert.engine(prompt(1, 5, seed=1), output_hidden_states=True)
    kept = copy.deepcopy(first)
    bert.engine(prompt(1, 5, seed=2), output_hidden_states=True)
    assert torch.equal(first.logits, kept.logits)
    assert all(torch.equal(a, b) for a, b in zip(first.hidden_states, kept.hidden_states, strict=True))
    close(bert.original(prompt(1, 5, seed=1), output_hidden_states=True), first)


def test_old_shapes_make_room(bert: Pair) -> None:
    for length in range(1, 20):
        bert.engine(prompt(1, length))
    assert captured(bert) == 16
    close(bert.original(prompt(1, 1)), bert.engine(prompt(1, 1)))


def test_hooks_hear_what_they_would_hear(bert: Pair) -> None:
    ids = prompt(1, 6)
    bert.engine(ids)
    heard: list[int] = []
    handle = bert.engine.module.get_submodule("cls").register_forward_hook(lambda *_: heard.append(1))
    bert.engine(ids)
    assert heard == [1]
    assert "hooks are registered on the model" in str(bert.engine.report())
    handle.remove()


def test_a_weight_that_was_replaced_is_captured_again(bert: Pair) -> None:
    ids = prompt(1, 6)
    before = bert.engine(ids).logits
    for model in (bert.original, bert.engine.module):
        norm = model.bert.embeddings.LayerNorm
        norm.weight = torch.nn.Parameter(norm.weight.detach().flip(0))
    assert not torch.allclose(bert.original(ids).logits, before, atol=0.1)
    close(bert.original(ids), bert.engine(ids))


def test_new_weights_are_read_by_the_graphs_that_are_there(bert: Pair) -> None:
    ids = prompt(1, 6)
    bert.engine(ids)
    graphs = list(bert.engine._graphs._captured.values())
    other = make("bert", seed=1)
    bert.engine.refresh_weights(other)
    close(other(ids), bert.engine(ids))
    now = list(bert.engine._graphs._captured.values())
    assert all(graph is before for graph, before in zip(now, graphs, strict=True))


def test_a_cache_in_the_outputs_is_left_to_the_model() -> None:
    llama = pair("llama", settings=GRAPHS)
    ids = prompt(2, 6)
    for use_cache in (True, False):
        close(llama.original(ids, use_cache=use_cache).logits, llama.engine(ids, use_cache=use_cache).logits)
        assert captured(llama) == (0 if use_cache else 1)
    assert "a forward ran without a graph" in str(llama.engine.report())
