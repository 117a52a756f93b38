"""Products cut into parts of their columns: the same numbers, and no copy where the matrix has these runs."""

from __future__ import annotations

import pytest
import torch

from slipstream.ops.linear import Weight, linear, times, times_apart


def _weight(runs: tuple[int, ...], *, bias: bool) -> Weight:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(sum(runs), 24, generator=generator)
    added = torch.randn(sum(runs), generator=generator) if bias else None
    return Weight("plain", (sum(runs), 24), dense.split(runs), lambda *_: dense, added)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 63, 64, 130])
@pytest.mark.parametrize("runs", [(32, 16, 16), (64,), (32, 32), (32, 8, 8, 16)], ids=str)
@pytest.mark.parametrize("outputs", [(32, 16, 16, 0), (32, 16, 0, 16), (40, 8, 16, 0)], ids=str)
def test_parts_are_the_columns_of_the_whole_product(
    outputs: tuple[int, ...], runs: tuple[int, ...], rows: int, bias: bool
) -> None:
    weight = _weight(runs, bias=bias)
    x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(1))
    parts = times_apart(linear, x, weight, outputs)
    assert tuple(part.shape[1] for part in parts) == outputs
    torch.testing.assert_close(torch.cat(parts, dim=-1), times(linear, x, weight))


def test_many_rows_times_the_same_runs_are_not_joined() -> None:
    weight = _weight((32, 16, 16), bias=True)
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    q, k, v, gate = times_apart(linear, x, weight, (32, 16, 16, 0))
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and gate.numel() == 0
    q, k, v, gate = times_apart(linear, x[:63], weight, (32, 16, 16, 0))
    assert not q.is_contiguous()
