"""transformers' cache follows `sliding_window` of the config, which a model's layers may not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.models import left_padded, pair, roads

_LENGTH, _NEW = 9, 6


@pytest.mark.parametrize(
    ("kind", "window", "road"),
    [
        ("llama", 5, "compatible"),  # llama sees everything, its cache forgets
        ("llama", _LENGTH + _NEW, "engine"),  # nothing is forgotten before the end
        ("gpt2", 5, "compatible"),
        ("mistral", 5, "engine"),  # the layers have the window too
        ("mistral", 1, "compatible"),  # the cache of one token forgets nothing
    ],
)
def test_generation_forgets_what_the_original_forgets(kind: str, window: int, road: str) -> None:
    models = pair(kind, sliding_window=window)
    ids, mask = left_padded(length=_LENGTH)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": _NEW, "do_sample": False}
    expected = models.original.generate(ids, **options)
    with roads(models.engine) as counts:
        got = models.engine.generate(ids, **options)
    assert torch.equal(expected, got)
    assert counts.taken == road
