"""What comes before the first kernel of a generation: steps laid out, and what transformers need not make."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.engine.generation.runner import make_step
from slipstream.engine.generation.schedule import Chunk
from slipstream.model.block.paged_cache import BLOCK_SIZE
from tests.helpers.models import pair, prompt

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk(0, 0, 1, True)],
        [Chunk(2, 0, 3 * BLOCK_SIZE, False)],
        [Chunk(0, 5, 40, False), Chunk(1, 31, 1, True), Chunk(2, 0, 33, True)],
        [Chunk(row, 60 + row, 1, row != 1) for row in (2, 0, 1)],
    ],
)
def test_a_step_lays_chunks_out_as_their_blocks_say(chunks: list[Chunk]) -> None:
    blocks = [[7, 1, 9], [4, 2, 11, 30], [0, 5, 3]]
    step = make_step(chunks, lambda c: torch.arange(c.start, c.start + c.count) + 100 * c.row, blocks, CPU)
    places = [(c.row, p) for c in chunks for p in range(c.start, c.start + c.count)]
    assert step.positions.tolist() == [p for _, p in places]
    assert step.token_ids.tolist() == [100 * row + p for row, p in places]
    assert step.slots.tolist() == [
        blocks[row][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, p in places
    ]
    ends = [sum(c.count for c in chunks[: i + 1]) for i in range(len(chunks))]
    lens = [c.start + c.count for c in chunks]
    assert step.query_starts.tolist() == [0, *ends]
    assert step.kv_lens.tolist() == lens
    assert step.logit_rows.tolist() == [e - 1 for e, c in zip(ends, chunks, strict=True) if c.is_last]
    for chunk, row in zip(chunks, step.block_table.tolist(), strict=True):
        used = -(-(chunk.start + chunk.count) // BLOCK_SIZE)
        assert row[:used] == blocks[chunk.row][:used]
    assert (step.max_query_len, step.max_kv_len) == (max(c.count for c in chunks), max(lens))
    made = (step.positions, step.slots, step.logit_rows, step.query_starts, step.kv_lens, step.block_table)
    assert [t.dtype for t in made] == [torch.int64] * 3 + [torch.int32] * 3
    # Kernels are compiled for tensors that begin at multiples of 16 bytes.
    assert all(t.data_ptr() % 16 == 0 and t.is_contiguous() for t in made if t.numel())


def test_transformers_make_no_cache_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.generation.utils as utils

    both, made, own = pair("llama"), [], utils.DynamicCache

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return own(*args, **kwargs)

    monkeypatch.setattr(utils, "DynamicCache", counted)
    for settings in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}):
        ids = prompt(2, 5)
        found = both.engine.generate(ids, max_new_tokens=4, past_key_values=None, **settings)
        seen = len(made)
        assert torch.equal(found, both.original.generate(ids, max_new_tokens=4, **settings))
        assert not seen
        made.clear()
