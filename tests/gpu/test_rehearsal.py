"""Whole engines upon the GPU's kernels, interpreted, with steps captured as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

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


def test_a_seed_draws_what_transformers_draws() -> None:
    both = pair("llama", settings={"enable_cuda_graph": True})
    options = {"max_new_tokens": 3, "do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.5}
    drawn = []
    for model in (both.original, both.engine):
        torch.manual_seed(3)
        drawn.append(model.generate(prompt(2, 5), **options))
    assert torch.equal(*drawn)
