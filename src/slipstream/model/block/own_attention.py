"""Runs a block whose family decides which keys a query attends to: windows of an image, blocks of a text.

Shapes: B batch, S rows, C hidden, H heads, D head dim, N groups of rows that attend to each other, L keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from slipstream.families import OwnAttention
from slipstream.model.block.block import Block, RopeTable
from slipstream.ops.attention import attention as reference

__all__ = ["run_own"]

_LEAST_SCORES = 500_000
"""Scores of a call from which the bound attention is faster than torch's between torch's own operations,
whose idle threads compete with the library's: a Swin-T in bfloat16 takes 60 ms for one picture, with 461,000
scores in its first layers, and 58 if torch attends; for four 172 ms, and 185 if torch always attends."""


@dataclass(frozen=True)
class _Heads:
    """`families.Heads` for a block and its input `(B, S, C)`."""

    block: Block
    hidden: Tensor

    @property
    def entered(self) -> Tensor:
        return self.block.entered(self.hidden.flatten(0, 1)).view(self.hidden.shape)

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.view(*rows.shape[:-1], *t.shape[1:]) for t in self.block.project(rows.flatten(0, -2)))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        few = q.shape[:3].numel() * k.shape[2] < _LEAST_SCORES
        run = reference if few and q.device.type == "cpu" else self.block.ops.attention.run
        scale = self.block.spec.scale
        attended: Tensor = run(q, k, v, mask=mask, causal=False, scale=scale, softcap=None, sinks=None)
        return attended


def run_own(
    block: Block,
    hidden: Tensor,
    rope: RopeTable | None,
    *,
    layer: nn.Module,
    attention: OwnAttention,
    given: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    """Run a block with its family's attention, in place of its layer.

    Args:
        block: The fused layer.
        hidden: `(B, S, C)`.
        rope: The table of these rows, where the spec has a rope.
        layer: The module with the parts that the attention reads besides the block's tensors.
        attention: The family's attention.
        given: The arguments of the call by name.

    Returns:
        `(B, S, C)`, then whatever else the layer returns.
    """
    extras: list[Tensor] = []
    groups, enter = hidden.shape[:2], attention.enter

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (t.unflatten(0, groups) for t in (q, k, v))
        attended, *others = attention.run(_Heads(block, hidden), layer, given, *rows)
        extras.extend(others)
        return attended.flatten(0, 1)

    def branch(entered: Tensor) -> Tensor:
        nonlocal groups
        assert enter is not None
        rows = enter(layer, given, entered.unflatten(0, hidden.shape[:2]))
        groups = rows.shape[:2]
        return block.sum(block.attention(rows.flatten(0, 1), rope, attend))

    out = block(hidden.flatten(0, 1), rope, attend, mix=None if enter is None else branch)
    return (out.view(hidden.shape), *extras)
