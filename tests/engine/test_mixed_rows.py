"""Custom processors that read one row's scores for another's: rows that have ended still count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from tests.helpers.models import pair

ENDS = list(range(3, 100, 3))


class Guided(LogitsProcessor):
    """Guidance within one batch: the last row guides the others."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.cat([scores[:-1] + 1.5 * (scores[:-1] - scores[-1:]), scores[-1:]])


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 20}])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_rows_that_have_ended_are_still_read(kind: str, options: dict[str, Any]) -> None:
    models = pair(kind)
    for seed in range(6):
        ids = torch.randint(4, 90, (3, 6), generator=torch.Generator().manual_seed(seed))
        made = []
        for model in (models.original, models.engine):
            torch.manual_seed(7)
            processors = LogitsProcessorList([Guided()])
            more = {"max_new_tokens": 12, "eos_token_id": ENDS, "pad_token_id": 0, **options}
            made.append(model.generate(ids, logits_processor=processors, **more))
        assert torch.equal(*made)
