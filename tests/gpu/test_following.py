"""A kernel that chooses a token makes the step that follows as the reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.triton import KERNELS
from slipstream.ops.bind import Kernel
from slipstream.ops.draw import Warp, draw
from slipstream.ops.next_step import Following
from slipstream.ops.sample import sample
from tests.gpu.place import DEVICE

SIZE, AHEAD, WIDTH = 32, 5, 3
NAMES = ("tokens", "counts", "token_ids", "positions", "kv_lens", "slots", "block_table", "arrived")


def kernel_of(op: str, kernels: tuple[Kernel, ...] = KERNELS) -> Kernel:
    return next(k for k in kernels if k.op == op)


def following_of(lengths: list[int]) -> Following:
    """Steps in blocks of no order, whose next tokens stand at these positions."""
    rows = len(lengths)
    table = torch.randperm(rows * WIDTH, generator=torch.Generator().manual_seed(1)).view(rows, WIDTH).int()
    at = torch.tensor(lengths)
    block = table.gather(1, (at // SIZE).clamp(max=WIDTH - 1)[:, None])[:, 0]
    ids = torch.zeros(rows, dtype=torch.int64)
    tensors = (
        torch.zeros(rows, AHEAD, dtype=torch.int64),
        ids.clone(),
        ids.clone(),
        at,
        at.int() + 1,
        block * SIZE + at % SIZE,
        table,
        ids.int(),
    )
    return Following(*(t.to(DEVICE) for t in tensors), SIZE)


def scores_of(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Random scores, rounded so that many of the best are equal."""
    scores = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    return (2 * scores).round().to(dtype)


def unequal(kernel: Kernel, rows: int, vocabulary: int, dtype: torch.dtype, lengths: list[int]) -> float:
    """How many numbers are not the reference's after four steps that follow each other."""
    ours, theirs = following_of(lengths), following_of(lengths)
    wrong = 0
    for step in range(4):
        scores = scores_of(rows, vocabulary + step, dtype)
        got = kernel.run(scores=scores.to(DEVICE), greedy=True, following=ours)
        expected = sample(scores.float().to(DEVICE), greedy=True, following=theirs)
        wrong += int((got != expected).sum())
    return float(wrong + sum(int((getattr(ours, n) != getattr(theirs, n)).sum()) for n in NAMES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (1, 63), (1, 509), (1, 2051), (3, 129), (9, 300)])
def test_the_best_token_is_the_next_steps(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    lengths = [(31 + 33 * row) % 95 for row in range(rows)]
    assert unequal(kernel_of("sample"), rows, vocabulary, dtype, lengths) == 0


def test_a_drawn_token_is_the_next_steps() -> None:
    ours, theirs = following_of([31, 60]), following_of([31, 60])
    generator = torch.Generator().manual_seed(2)
    for warp in (Warp(0.7, top_k=9), Warp(1.2, top_p=0.9)):
        given: dict[str, Any] = {
            "scores": torch.randn(2, 301, generator=generator).to(torch.bfloat16),
            "noise": torch.empty(2, 301).exponential_(generator=generator),
            "numbers": warp.numbers(301, torch.device("cpu")),
        }
        given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
        assert torch.equal(kernel_of("draw").run(**given, following=ours), draw(**given, following=theirs))
    for name in NAMES:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_scores_that_are_all_hidden_choose_the_first() -> None:
    scores = torch.full((2, 700), -torch.inf, device=DEVICE)
    assert kernel_of("sample").run(scores=scores, greedy=True).tolist() == [0, 0]


def test_a_row_beyond_its_blocks_stays_in_the_last_one() -> None:
    ours = following_of([WIDTH * SIZE - 1])
    for _ in range(2):
        kernel_of("sample").run(scores=torch.ones(1, 7, device=DEVICE), greedy=True, following=ours)
    assert ours.positions.tolist() == [WIDTH * SIZE + 1]
    assert ours.slots.tolist() == [int(ours.block_table[0, -1]) * SIZE + 1]
    assert ours.kv_lens.tolist() == [WIDTH * SIZE + 2]
