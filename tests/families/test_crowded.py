"""Threads that other processes keep from their processors: a call goes on without them, to the same bits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.families import FAMILIES, Family, Tiny
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import Library, load
from tests.families.sweep import peaked_model

pytestmark = pytest.mark.skipif(load() is None, reason="no native library")

BARRIERS = (0, 1, 2, 5, 11)
"""No worker begins, or one leaves at that barrier of each call. Which one of them a family has, varies."""

WRITERS = [
    pytest.param(tiny, family, id=f"{family.name}-{tiny.label or 'plain'}")
    for family in FAMILIES.values()
    for tiny in family.tiny[:1]
    if tiny.model.endswith("ForCausalLM") and hasattr(transformers, tiny.model)
]


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two threads for the library, one for torch, whose threads would compete with it here."""
    library = load()
    assert isinstance(library, Library)
    monkeypatch.setattr(native._kept, "threads", 2, raising=False)
    yield library.handle.slipstream_crowd
    library.handle.slipstream_crowd(-1)


@pytest.mark.parametrize(("tiny", "family"), WRITERS)
def test_a_thread_that_leaves_changes_no_bit(tiny: Tiny, family: Family, crowd: Any) -> None:
    original = peaked_model(tiny)
    quant: dict[str, Any] = ({}, {"quant": "int8"}, {"quant": "int4"})[zlib.crc32(family.name.encode()) % 3]
    engine = slipstream.init_inference(
        original, dtype=torch.float32, replace_with_kernel_inject=True, **quant
    )
    ids = torch.randint(3, 90, (2, 37), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def answers() -> list[Tensor]:
        with torch.no_grad():
            logits = engine(ids, attention_mask=mask).logits
        some = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 6}
        single = {"pad_token_id": 0, "max_new_tokens": 9, "do_sample": False}
        torch.manual_seed(3)
        drawn = engine.generate(ids, do_sample=True, top_k=9, **some)
        return [logits, drawn, engine.generate(ids[1:], **single)]

    expected = answers()
    for barrier in BARRIERS:
        crowd(barrier)
        got = answers()
        crowd(-1)
        for one, other in zip(expected, got, strict=True):
            assert torch.equal(one, other), f"a thread that leaves at barrier {barrier} changes the answer"
