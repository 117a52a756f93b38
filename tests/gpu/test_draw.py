"""Which tokens may be drawn: noise that favours one token draws it, unless it may not be drawn."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.triton import KERNELS
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
