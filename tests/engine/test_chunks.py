"""Models whose tokens attend within chunks of positions (Llama 4) generate on the engine road."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.generation.batch import Batch
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from tests.engine.test_recurrent import both, two_of
from tests.families.sweep import VARIANTS, label
from tests.helpers.models import Pair, left_padded, prompt

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

BY_NAME = {label(v): v for v in VARIANTS if v[0].name == "llama4_text"}
CHUNK = 6


@pytest.fixture(scope="module")
def growing() -> Pair:
    return two_of(BY_NAME["llama4_text"])


@pytest.fixture(scope="module")
def plain() -> Pair:
    return two_of(BY_NAME["llama4_text two experts, plain heads"])


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 1, 40])
def test_prompts_that_end_around_a_chunk(growing: Pair, length: int) -> None:
    both(growing, input_ids=prompt(2, length), max_new_tokens=2 * CHUNK + 1)


def test_chunks_of_padded_rows_begin_where_the_rows_do(plain: Pair) -> None:
    ids, mask = left_padded()
    both(plain, input_ids=ids, attention_mask=mask, max_new_tokens=2 * CHUNK + 1)


def test_positions_that_count_padding_are_left_to_the_original_s_loop(growing: Pair) -> None:
    ids, mask = left_padded()
    both(growing, road="compatible", input_ids=ids, attention_mask=mask)
    both(growing, input_ids=ids[:1], attention_mask=torch.ones_like(mask[:1]))


def test_prompts_in_pieces(plain: Pair) -> None:
    runner, rows = plain.engine._built.runner, prompt(3, 40)
    with torch.no_grad():
        whole, pieces = (Batch(runner, rows, None, max_length=48, token_budget=budget) for budget in (512, 7))
        torch.testing.assert_close(pieces.logits(), whole.logits(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 20])
def test_forwards_with_and_without_a_cache(growing: Pair, length: int) -> None:
    ids = prompt(2, length + 3)
    answers = []
    for model in (growing.original, growing.engine):
        with torch.no_grad():
            whole = model(input_ids=ids).logits
            first = model(input_ids=ids[:, :length], use_cache=True)
            later = model(input_ids=ids[:, length:], past_key_values=first.past_key_values)
        answers.append((whole, first.logits, later.logits))
    for theirs, ours in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
