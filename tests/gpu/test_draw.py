"""Which tokens may be drawn: noise that favours one token draws it, unless it may not be drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.triton import KERNELS
from slipstream.ops.bind import Kernel
from slipstream.ops.draw import Warp, draw
from tests.gpu.place import place

TOKENS = 24
WARPS = (
    Warp(1.5, min_p=0.2),
    Warp(1.5, top_p=0.7),
    Warp(0.8, top_k=6),
    Warp(2.0, top_k=15, top_p=0.8, min_p=0.05),
)


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_every_token_that_may_be_drawn_is_and_no_other(warp: Warp) -> None:
    scores = 2 * torch.randn(TOKENS, generator=torch.Generator().manual_seed(5))
    given = {
        "scores": scores.expand(TOKENS, -1).contiguous(),
        "noise": torch.ones(TOKENS, TOKENS).fill_diagonal_(1e-30),
        "numbers": warp.numbers(TOKENS, scores.device),
    }
    expected = draw(**given)
    allowed = int((expected == torch.arange(TOKENS)).sum())
    assert 1 < allowed < TOKENS
    kernel = next(k for k in KERNELS if k.op == "draw")
    assert kernel.run(**{n: place(v) for n, v in given.items()}).tolist() == expected.tolist()


def edge(kernel: Kernel, scores: Tensor, warp: Warp) -> float:
    """How many of eight tokens beside the edge of what may be drawn are drawn where they may not be, or not.

    A single draw nearly never shows where that edge is.
    """
    count = scores.shape[0]
    numbers, order = warp.numbers(count, scores.device), scores.argsort(descending=True)
    noise = torch.ones(count, count).fill_diagonal_(1e-30)
    expected = draw(scores.expand(count, -1), noise, numbers)
    allowed = int((expected == torch.arange(count)).sum())
    beside = order[max(allowed - 4, 0) : allowed + 4]
    rows = scores.expand(len(beside), -1).contiguous()
    got = kernel.run(place(rows), place(noise[beside]), place(numbers)).cpu()
    return float((got != expected[beside]).sum())


@pytest.mark.parametrize(
    ("count", "width", "warp"),
    [
        (600, 0.1, Warp(1.0, top_p=0.9)),
        (600, 0.1, Warp(1.0, top_k=300, top_p=0.8)),
        (600, 0.1, Warp(1.0, top_k=300)),
        (500, 3.0, Warp(1.5, top_p=0.95)),
        (500, 3.0, Warp(2.0, top_k=200, top_p=0.6, min_p=0.01)),
        (300, 3.0, Warp(2.0, top_k=40, top_p=0.7)),
    ],
    ids=str,
)
def test_the_edge_of_what_may_be_drawn_lies_where_it_should(count: int, width: float, warp: Warp) -> None:
    """Of more tokens than a program keeps in registers, of fewer, and of both one after the other."""
    scores = width * torch.randn(count, generator=torch.Generator().manual_seed(11))
    assert edge(next(k for k in KERNELS if k.op == "draw"), scores, warp) == 0
