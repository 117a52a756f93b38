"""Runs one step of the engine road: embed, stack, final norm, head. The same signature eagerly and captured.

Shapes: T packed tokens, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from slipstream.engine.schedule import Chunk
from slipstream.model.block import Block, RopeTable
from slipstream.model.cache import BLOCK_SIZE, PagedCache
from slipstream.model.frame import Frame, run_stack
from slipstream.ops.step import Step
from slipstream.spec import Rope

__all__ = ["Runner", "Stack", "make_step"]

Stack = Callable[
    [Sequence[Block], Tensor, Step, Sequence[tuple[Tensor, Tensor]], dict[Rope, RopeTable]], Tensor
]
"""Runs layers that follow each other; `run_stack` is the definition."""

Timer = Callable[[str], AbstractContextManager[None]]
"""Times what runs within its context under a name."""


def no_timer(name: str) -> AbstractContextManager[None]:
    """The timer of an engine that is not profiled."""
    return nullcontext()


class Runner:
    """A causal language model over packed tokens: `runner(step, cache) -> logits`.

    Attributes:
        frame: What stands around the layers.
        blocks: The layers in order.
        names: Their paths, for the profile.
        stack: Runs the layers.
        timer: Replaced while the engine is profiled.
    """

    def __init__(
        self, frame: Frame, blocks: Sequence[Block], names: Sequence[str], *, stack: Stack = run_stack
    ) -> None:
        """Take the parts as they are."""
        self.frame, self.blocks, self.names, self.stack = frame, list(blocks), list(names), stack
        self.timer: Timer = no_timer

    def __call__(self, step: Step, cache: PagedCache) -> Tensor:
        """Run one step.

        Args:
            step: Packed tokens and where they go.
            cache: Updated in place.

        Returns:
            Logits `(R, V)` of `step.logit_rows`, in the engine's dtype.
        """
        with self.timer(""):
            tables = self.frame.angles(step.positions, [block.spec.rope for block in self.blocks])
            x = self.frame.enter(step.token_ids, step.positions)
            if self.timer is no_timer:
                x = self.stack(self.blocks, x, step, cache.layers, tables)
            else:
                for name, block, pair in zip(self.names, self.blocks, cache.layers, strict=True):
                    with self.timer(name):
                        x = self.stack([block], x, step, [pair], tables)
            return self.frame.leave(x[step.logit_rows])

    def new_cache(self, blocks: int) -> PagedCache:
        """A cache of `blocks` blocks per layer, in the model's dtype and on its device."""
        weight = self.frame.embed._parameters["weight"]  # as an attribute, it would be unpacked
        return PagedCache(
            [block.spec for block in self.blocks], blocks, dtype=weight.dtype, device=weight.device
        )


def make_step(
    chunks: Sequence[Chunk],
    tokens: Callable[[Chunk], Tensor],
    blocks: Sequence[Sequence[int]],
    device: torch.device,
) -> Step:
    """Lay out what a schedule decided as tensors.

    Args:
        chunks: At least one.
        tokens: The ids of a chunk, `(count,)`.
        blocks: Cache blocks of every sequence, in order, enough for the chunk's last token.
        device: Where the step runs.

    Returns:
        A step whose `logit_rows` are the last tokens of the chunks that want them, in the order of the
        chunks.
    """
    counts = [chunk.count for chunk in chunks]
    lens = [chunk.start + chunk.count for chunk in chunks]
    positions = [p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.count)]
    owners = [chunk.row for chunk in chunks for _ in range(chunk.count)]
    slots = [
        blocks[r][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for r, p in zip(owners, positions, strict=True)
    ]
    width = -(-max(lens) // BLOCK_SIZE)
    table = [
        list(blocks[chunk.row][:width]) + [0] * (width - len(blocks[chunk.row][:width])) for chunk in chunks
    ]
    ends, total = [], 0
    for count in counts:
        total += count
        ends.append(total)

    def ints(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Step(
        token_ids=torch.cat([tokens(chunk) for chunk in chunks]).to(device),
        positions=ints(positions, torch.int64),
        query_starts=ints([0, *ends], torch.int32),
        kv_lens=ints(lens, torch.int32),
        block_table=ints(table, torch.int32),
        slots=ints(slots, torch.int64),
        logit_rows=ints([e - 1 for e, c in zip(ends, chunks, strict=True) if c.is_last], torch.int64),
        max_query_len=max(counts),
        max_kv_len=max(lens),
    )
