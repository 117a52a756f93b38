"""The step that follows, in plain torch: tokens, lengths and places as plain Python counts them."""

from __future__ import annotations

import torch

from slipstream.ops.next_step import Following
from slipstream.ops.sample import sample

BLOCKS = [[4, 1, 7], [2, 9, 3]]


def test_a_step_follows_where_its_blocks_say() -> None:
    at = [30, 63]
    following = Following(
        tokens=torch.zeros(2, 4, dtype=torch.int64),
        counts=torch.zeros(2, dtype=torch.int64),
        token_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.tensor(at),
        kv_lens=torch.tensor(at, dtype=torch.int32) + 1,
        slots=torch.zeros(2, dtype=torch.int64),
        block_table=torch.tensor(BLOCKS, dtype=torch.int32),
        arrived=torch.zeros(2, dtype=torch.int32),
        block_size=32,
    )
    for count in range(1, 5):
        best = [count, 3 * count % 7]
        scores = torch.nn.functional.one_hot(torch.tensor(best), 16).float()
        assert sample(scores, greedy=True, following=following).tolist() == best
        now = [p + count for p in at]
        assert following.token_ids.tolist() == best == following.tokens[:, count - 1].tolist()
        assert following.counts.tolist() == [count, count]
        assert following.positions.tolist() == now
        assert following.kv_lens.tolist() == [p + 1 for p in now]
        assert following.slots.tolist() == [
            32 * row[p // 32] + p % 32 for row, p in zip(BLOCKS, now, strict=True)
        ]
    assert following.arrived.tolist() == [0, 0]
