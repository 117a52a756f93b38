"""Whole engines upon the GPU's kernels, interpreted, with steps captured as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.devices.record import Recorder
from slipstream.kernels.triton.target import interpreted
from tests.gpu.rehearsal import rehearsing
from tests.helpers.models import left_padded, pair, prompt

pytestmark = pytest.mark.skipif(not interpreted(), reason="engines on a GPU are asked by scripts/gpu_check")


@pytest.fixture(autouse=True)
def _rehearsal() -> Iterator[None]:
    with rehearsing():
        yield


@pytest.mark.parametrize(("kind", "settings"), [("gemma2", {})])
def test_an_engine_with_captured_steps_says_what_the_model_says(kind: str, settings: dict[str, Any]) -> None:
    both = pair(kind, settings={"enable_cuda_graph": True, **settings})
    report = both.engine.report()
    assert {layer.kernels["stack"] for layer in report.layers} == {"triton"}
    assert any("captured as graphs" in note for note in report.notes)
    ids, mask = left_padded(3, 5)
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(both.engine.generate(**given), both.original.generate(**given))


@pytest.mark.parametrize("draws", [False, True])
def test_a_captured_step_launches_six_beside_its_layers(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles, embedding, cleared counters; norm, head, and the choice that makes the next step."""
    recorders: list[Recorder] = []

    class Kept(Recorder):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            recorders.append(self)

    monkeypatch.setattr("slipstream.devices.null.Recorder", Kept)
    both = pair("llama", settings={"enable_cuda_graph": True})
    if draws:
        both.engine.generate(prompt(1, 4), max_new_tokens=2, do_sample=True, top_k=4)
    names = [func.name() for func, *_ in recorders[-1]._calls if not _is_free(func)]
    layers = len(both.engine.report().layers)
    ours = [name for name in names if name.startswith("slipstream::")]
    assert [n for n in names if n not in ours] == ["aten::index_select"] * 2 + ["aten::zeros"]
    assert ours[-3:] == [
        "slipstream::norm",
        "slipstream::linear",
        f"slipstream::{'draw' if draws else 'best'}",
    ]
    assert len(ours) == 5 * layers + 3


def _is_free(func: Any) -> bool:
    """Whether an operation launches nothing: it looks at memory otherwise, or asks for some."""
    returns = func._schema.returns
    views = all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return views or func._schema.name in (
        "aten::empty",
        "aten::new_empty",
        "aten::empty_like",
        "aten::_unsafe_view",
    )


def test_a_seed_draws_what_transformers_draws() -> None:
    both = pair("llama", settings={"enable_cuda_graph": True})
    options = {"max_new_tokens": 3, "do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.5}
    drawn = []
    for model in (both.original, both.engine):
        torch.manual_seed(3)
        drawn.append(model.generate(prompt(2, 5), **options))
    assert torch.equal(*drawn)
