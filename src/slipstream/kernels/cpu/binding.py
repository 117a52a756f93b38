"""Chooses whether the layers of an engine run in one native call."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.kernels.cpu.blocks import refuse_block
from slipstream.kernels.cpu.library import ISAS, load, refuse
from slipstream.kernels.cpu.stack import NativeStack, Run
from slipstream.kernels.requirements import BlockLike
from slipstream.ops.bind import Bound

__all__ = ["bind_encoder", "bind_stack"]


def bind_stack(blocks: Sequence[BlockLike], otherwise: Run) -> Bound:
    """Choose the implementation that runs all blocks: one native call, or `otherwise`.

    Args:
        blocks: The layers in order.
        otherwise: The fallback, `model.frame.run_stack`, which also runs the steps that torch runs faster.
    """
    refused: dict[str, str] = {}
    for isa in ISAS:
        name = f"cpu-{isa}"
        library = load(isa) if (reason := refuse(isa)) is None else None
        reason = reason or next((why for block in blocks if (why := refuse_block(block))), None)
        if reason is None and all(block.spec.branches == "feed_forward" for block in blocks):
            reason = "no layer has attention or a recurrence"
        if library is not None and reason is None and blocks:
            return Bound("stack", name, NativeStack(blocks, library, otherwise), refused)
        refused[name] = reason or "there are no blocks"
    return Bound("stack", "reference", otherwise, refused)


def bind_encoder(blocks: Sequence[BlockLike], otherwise: Run) -> NativeStack | None:
    """Return a stack, for use without a cache, of those blocks that the library supports; None if none is."""
    bound = bind_stack([block for block in blocks if refuse_block(block) is None], otherwise)
    return bound.run if isinstance(bound.run, NativeStack) else None
