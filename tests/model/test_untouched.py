"""A model is run while an engine is built of it: what that leaves is nothing, or all that goes together."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.model.selfcheck.untouched import left_as_it_was
from tests.helpers.models import close, inject, make, prompt


class Noting(nn.Module):
    """Counts its forwards, and at the first halves its weight, where it is asked to."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.halves, self.seen = halves, 0

    def forward(self, x: Tensor) -> Any:
        if self.halves and not self.seen:
            self.inner.weight.div_(2)
        self.seen += 1
        return self.inner(x)


@pytest.mark.parametrize("halves", [False, True])
def test_what_a_model_notes_stays_where_what_it_wrote_into_its_weights_does(halves: bool) -> None:
    model = Noting(halves)
    before = model.inner.weight.detach().clone()
    with torch.no_grad(), left_as_it_was(model):
        model(torch.ones(1, 4))
    assert model.seen == int(halves)
    assert torch.equal(model.inner.weight, before / 2 if halves else before)


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran before"])
def test_layers_that_are_divided_at_the_first_forward_are_divided_once(ran: bool) -> None:
    config = transformers.RwkvConfig(
        vocab_size=128,
        context_length=32,
        hidden_size=32,
        attention_hidden_size=32,
        num_hidden_layers=3,
        rescale_every=1,
    )
    torch.manual_seed(0)
    original = transformers.RwkvForCausalLM(config).eval()
    ids = prompt(2, 7)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
        if ran:
            original(ids)
        engine = slipstream.init_inference(
            copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
        )
        expected = original(ids).logits
        close(expected, engine(ids).logits)
        close(expected, engine(ids).logits)


@pytest.mark.filterwarnings("ignore:replace_with_kernel_inject=True replaced nothing")
@pytest.mark.parametrize("length", [12, 48])
def test_layers_that_change_their_attention_by_the_length_of_a_prompt_do_so_in_an_engine(length: int) -> None:
    """BigBird attends to all of a short prompt by other modules than to blocks of a long one."""
    torch.manual_seed(0)
    config = transformers.BigBirdConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        block_size=4,
    )  # fmt: skip
    original = transformers.BigBirdForMaskedLM(config).eval()
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
    )
    ids = prompt(2, length)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    answers = []
    for model in (original, engine):
        np.random.seed(0)  # which blocks are seen is drawn
        with torch.no_grad():
            answers.append(model(ids, attention_mask=mask).logits[mask.bool()])
    close(*answers)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_embeddings_that_limit_their_rows_are_put_back(kind: str) -> None:
    """Looking a row up rescales it in place: a tied head would show which ones an engine was built with."""
    model = make(kind)
    table = model.get_input_embeddings()
    table.max_norm = 0.5
    before = table.weight.detach().clone()
    engine = inject(model)
    assert torch.equal(engine.module.get_input_embeddings().weight, before)
    with torch.no_grad():
        close(model(input_ids=prompt()).logits, engine(input_ids=prompt()).logits, atol=1e-3)
