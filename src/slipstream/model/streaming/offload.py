"""Streamed layers: fused blocks whose matrices are views of bays, and a stack that runs them one by one.

Shapes: T packed tokens, C hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from slipstream.model.block.block import Block, RopeTable
from slipstream.model.streaming.stream import Streamer
from slipstream.ops.bind import Bound
from slipstream.ops.kv_cache import Caches
from slipstream.ops.step import Step, piece_of
from slipstream.spec import Role, Rope

__all__ = ["OneByOne", "offload_block", "one_by_one"]


def offload_block(block: Block, streamer: Streamer) -> None:
    """Hand a block's matrices over to a streamer; its norms, biases and smallest planes stay on the device.

    The streamed matrices have no values until `Streamer.start`.
    """
    places: list[tuple[Role, int]] = []
    tensors: list[Tensor] = []
    for role, weight in block.weights.matrices.items():
        for index, plane in enumerate(weight.planes):
            if plane.numel() >= max(1, streamer.offload.least):
                places.append((role, index))
                tensors.append(plane)

    def put(views: Sequence[Tensor]) -> None:
        matrices = dict(block.weights.matrices)
        for (role, index), view in zip(places, views, strict=True):
            planes = list(matrices[role].planes)
            planes[index] = view
            matrices[role] = replace(matrices[role], planes=tuple(planes))
        block.weights = replace(block.weights, matrices=matrices)

    lease = streamer.keep(tensors, put)
    put([tensor.to("meta") for tensor in tensors])
    kept = {
        role: replace(
            weight, planes=tuple(plane if plane.is_meta else plane.clone() for plane in weight.planes)
        )
        for role, weight in block.weights.matrices.items()
    }
    block.weights = replace(block.weights, matrices=kept, lease=lease)


def one_by_one(bound: Bound) -> Bound:
    """Wrap a stack implementation so that it gets one layer at a time, while that layer is loaded."""
    return replace(bound, run=OneByOne(bound.run))


@dataclass(frozen=True)
class OneByOne:
    """Runs layers one by one, each within its lease.

    Attributes:
        stack: The stack implementation, called with a single layer.
    """

    stack: Any

    def __call__(
        self,
        blocks: Sequence[Block],
        x: Tensor,
        step: Step,
        caches: Caches,
        tables: dict[Rope, RopeTable],
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run the layers; arguments and result are those of `model.frame.run_stack`."""
        for index, (block, cache) in enumerate(zip(blocks, caches, strict=True)):
            with block.weights.held():
                x = self.stack([block], x, step, [cache], tables, piece_of(inputs, index))
        return x
