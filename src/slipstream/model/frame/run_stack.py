"""Runs layers over packed tokens and a paged cache: the definition of what native stacks and graphs do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from slipstream.model.block.block import Block, Mix, RopeTable
from slipstream.model.block.gate import Turning
from slipstream.model.block.latent_attention import attend_paged
from slipstream.model.block.streams import run_streams
from slipstream.ops.kv_cache import CachePart, Caches, write_cache
from slipstream.ops.step import Step
from slipstream.spec import Role, Rope

__all__ = ["run_stack"]


def run_stack(
    blocks: Sequence[Block],
    x: Tensor,
    step: Step,
    caches: Caches,
    tables: dict[Rope, RopeTable],
    inputs: Tensor | None = None,
) -> Tensor:
    """Run every layer over packed tokens and the paged cache.

    This is the definition of the largest op: everything it needs is in its arguments, so that one native
    call, or a captured graph, can replace it.

    Args:
        blocks: The layers in order.
        x: `(T, C)`, or `(T, S, C)` if the layers have several streams.
        step: Lengths, slots and block table.
        caches: What each layer keeps, of a layer that borrows that of the lending one; updated in place.
        tables: From `Frame.angles`.
        inputs: `(T, layers, P)` from `Frame.layer_inputs`, if the layers have inputs of their own.

    Returns:
        The output of the last layer, in the shape of `x`.
    """
    for index, (block, kept) in enumerate(zip(blocks, caches, strict=True)):

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            angles: RopeTable | None,
            block: Block = block,
            caches: tuple[CachePart, CachePart] = kept.pages,
        ) -> Tensor:
            ops, spec = block.ops, block.spec
            if (latent := spec.latent) is not None:
                write_cache(k, v, *caches, step.slots)
                up = block.weights.matrices[Role.KV_UP].dense().to(q.dtype)
                return attend_paged(q, caches, step, up, latent=latent, scale=spec.scale)
            pairs = spec.rope is not None and spec.rope.interleaved
            if spec.sharing == "borrows":
                q = q if angles is None else ops.rope.run(q, *angles, interleaved=pairs)
                return ops.paged_attention.run(q, *caches, step, mask=block.mask)  # type: ignore[no-any-return]
            q = ops.rope_cache.run(q, k, v, *caches, step.slots, tables=angles, interleaved=pairs)
            return ops.paged_attention.run(q, *caches, step, mask=block.mask)  # type: ignore[no-any-return]

        mix = None if block.spec.recurrence is None else _recurrent(block, step, kept.states)
        table = None if block.spec.rope is None else tables[block.spec.rope]
        own = None if inputs is None or not block.spec.inputs else inputs[:, index]
        if block.spec.streams is not None and own is not None:
            x = block.follow(partial(run_streams, block, x, table, Turning(attend), own))
            continue
        x = block(x, table, Turning(attend), mix=mix, positions=step.positions, inputs=own)
    return x


def _recurrent(block: Block, step: Step, states: Tensor | None) -> Mix:
    """Return the mixer of a block with a recurrence, on `(T, C)`."""
    part = block.part
    if part is None or states is None:
        raise AssertionError("a block with a recurrence runs without its mixer or its states")
    return lambda x: part(x, step, states, block.ops.linear.run)
