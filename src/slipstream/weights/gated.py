"""Recipes for attention with a gated output: the gate's rows come last in the role `QKV`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.spec import BlockSpec
from slipstream.weights.recipe import Piece, Plan, Recipe, Stack
from slipstream.weights.source import Source

__all__ = ["GatedQueries"]


@dataclass(frozen=True)
class GatedQueries(Recipe):
    """Separate q, k and v, where each head's rows of q are followed by its rows of the gate (Qwen3-Next).

    Attributes:
        names: Modules of q with the gate, of k, and of v.
    """

    names: tuple[str, str, str]

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """See `Recipe.plan`."""
        whole = Stack(self.names).plan(source, spec)
        if whole is None:
            return None

        def ordered(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
            if not pieces:
                return ()
            both, *others = pieces
            heads = range(spec.heads)
            q, gate = (
                [replace(both, start=(2 * h + part) * spec.head_dim, count=spec.head_dim) for h in heads]
                for part in (0, 1)
            )
            return (*q, *others, *gate)

        return Plan(ordered(whole.weight), ordered(whole.bias))
