"""Recipes for unusual feed-forward layouts: up before gate, alternating rows, experts in flat matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.errors import WeightError
from slipstream.spec import BlockSpec
from slipstream.weights.recipe import Piece, Plan, Recipe, Stack, Take
from slipstream.weights.source import Source

__all__ = ["Alternating", "PerExpert", "UpFirst"]


@dataclass(frozen=True)
class Alternating(Recipe):
    """One fused feed-forward matrix whose rows alternate gate, up, gate, up (GPT-OSS)."""

    name: str
    transposed: bool = False

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """See `Recipe.plan`."""
        whole = Take(self.name, self.transposed).plan(source, spec)
        if whole is None:
            return None

        def halves(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
            return tuple(
                replace(p, start=start, count=p.count // 2, step=2) for start in (0, 1) for p in pieces
            )

        return Plan(halves(whole.weight), halves(whole.bias))


@dataclass(frozen=True)
class PerExpert(Recipe):
    """Matrices `(E * n, m)` that hold the rows of all experts, one expert after the other (DBRX).

    Attributes:
        names: The matrices; an expert's rows are its rows of the first, then its rows of the second.
        transposed: Each expert's matrix is stored `(in, out)`.
    """

    names: tuple[str, ...]
    transposed: bool = False

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """See `Recipe.plan`.

        Raises:
            WeightError: The rows of a matrix cannot be divided evenly among the experts.
        """
        whole = Stack(self.names).plan(source, spec)
        if whole is None or spec.moe is None:
            return None
        experts = spec.moe.experts + spec.moe.idle
        pieces = []
        for piece in whole.weight:
            rows, width = source.shape(piece.name)
            if rows % experts:
                raise WeightError(f"{piece.name} has {rows} rows, not a multiple of its {experts} experts")
            count = width if self.transposed else rows // experts
            pieces.append(replace(piece, count=count, transposed=self.transposed, experts=experts))
        return Plan(tuple(pieces), ())


@dataclass(frozen=True)
class UpFirst(Recipe):
    """One feed-forward matrix whose halves are, if it is gated, up and then gate (Moonshine)."""

    name: str

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """See `Recipe.plan`."""
        whole = Take(self.name).plan(source, spec)
        if whole is None or not spec.gated:
            return whole

        def turned(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
            halves = ((p, p.count // 2) for p in pieces)
            return tuple(replace(p, start=start, count=half) for p, half in halves for start in (half, 0))

        return Plan(turned(whole.weight), turned(whole.bias))
