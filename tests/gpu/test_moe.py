"""The mixture of experts over sorted pairs."""

from __future__ import annotations

import pytest
import torch

from slipstream.formats import FORMATS, Format
from slipstream.kernels.triton.moe import KERNELS, sort_pairs
from slipstream.ops.linear import Weight
from slipstream.ops.moe import moe
from slipstream.spec import MoE
from tests.gpu.place import place


def test_every_pair_is_in_a_tile_of_its_expert() -> None:
    chosen = torch.randint(0, 5, (37, 2), generator=torch.Generator().manual_seed(0))
    pairs = sort_pairs(chosen, 5)
    row_of, expert_of, expert_of_pair = pairs.row_of, pairs.expert_of, pairs.expert_of_pair
    height = pairs.height
    assert sorted(row_of[row_of >= 0].tolist()) == list(range(74))
    for tile, expert in enumerate(expert_of.tolist()):
        rows = row_of[tile * height : (tile + 1) * height]
        rows = rows[rows >= 0]
        assert (expert >= 0) == bool(len(rows))
        assert bool((expert_of_pair[rows.long()] == expert).all())


@pytest.mark.parametrize("packed", FORMATS.values(), ids=lambda packed: packed.name)
def test_experts_in_each_format(packed: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    (kernel,) = KERNELS
    x = torch.randn(21, 64, generator=generator)
    router = FORMATS["plain"].weight(torch.randn(6, 64, generator=generator), None)
    first, second = (
        packed.weight(
            torch.randn(6, *shape, generator=generator) / 8, torch.randn(6, shape[0], generator=generator)
        )
        for shape in ((96, 64), (64, 48))
    )
    settings = {"spec": MoE(6, 2, normalize=True), "activation": "silu", "gated": True}
    expected = moe(x, router, first, second, **settings)
    got = kernel.run(place(x), place(router), place(first), place(second), **settings).cpu()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_what_lies_behind_the_last_expert_is_not_read() -> None:
    generator = torch.Generator().manual_seed(0)
    (kernel,) = KERNELS

    def last(*shape: int) -> Weight:
        count = shape[0] * shape[1] * shape[2]
        memory = torch.full((count + 4096,), torch.nan)
        dense = memory[:count].view(shape).copy_(torch.randn(shape, generator=generator) / 8)
        return Weight("plain", shape, (dense,), lambda *_: dense)

    x, router = torch.randn(9, 35, generator=generator), last(1, 3, 35).at(0)
    first, second = last(3, 42, 35), last(3, 35, 21)
    settings = {"spec": MoE(3, 2, normalize=True), "activation": "silu", "gated": True}
    expected = moe(x, router, first, second, **settings)
    there = [weight.apply(place) for weight in (router, first, second)]
    torch.testing.assert_close(kernel.run(place(x), *there, **settings).cpu(), expected, atol=1e-4, rtol=1e-4)
