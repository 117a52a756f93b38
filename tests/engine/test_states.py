"""Models that go on from a state of their own rather than from keys and values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream.errors import RequestError
from tests.helpers.models import VOCABULARY, close

SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
HEADS = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}
STATES: dict[str, dict[str, Any]] = {"Mamba": SMALL, "Mamba2": SMALL | HEADS, "FalconMamba": SMALL}


@pytest.mark.parametrize("name", STATES)
def test_a_step_takes_the_mask_of_all_tokens(name: str) -> None:
    """The state does not say how many it has seen, so the mask alone does."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**STATES[name])
    original = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
    )
    ids = torch.randint(1, VOCABULARY, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    got = []
    for model in (original, engine):
        with torch.no_grad():
            first = model(input_ids=ids[:, :8], attention_mask=mask[:, :8], use_cache=True)
            state = first.cache_params
            got.append(model(input_ids=ids[:, 8:], attention_mask=mask, cache_params=state, use_cache=True))
    close(got[0].logits, got[1].logits)
    with pytest.raises(RequestError, match=r"attention_mask has shape \(2, 9\) for .*\(2, 8\)"):
        engine(input_ids=ids[:, :8], attention_mask=mask)
