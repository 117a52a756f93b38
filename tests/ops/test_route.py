"""The routers choose as transformers' own do, in every precision."""

from __future__ import annotations

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from slipstream.ops.moe import route
from slipstream.spec import MoE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.4])
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])  # the threshold divides by magnitudes, so signs matter
def test_sparsemixer_is_phimoe_to_the_bit(dtype: torch.dtype, jitter: float, shift: float) -> None:
    logits = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)) + shift
    expected, experts = sparsemixer(logits.to(dtype), jitter, False)
    weights, chosen = route(logits.to(dtype), MoE(16, 2, "sparsemixer", jitter=jitter))
    assert torch.equal(chosen, experts)
    assert torch.equal(weights, expected.float())
