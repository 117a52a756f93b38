"""What runs the layers of a step, or whole steps, in place of the reference.

Shapes: T packed tokens, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from slipstream.model.block.block import Block, RopeTable
from slipstream.ops.kv_cache import Caches
from slipstream.ops.noise import RowNoise
from slipstream.ops.penalty import RowPenalty
from slipstream.ops.step import Step
from slipstream.spec import Rope

__all__ = ["Draws", "OnTokens", "Penalises", "Stack", "Suppresses", "Whole", "WholeSession"]


class Stack(Protocol):
    """Runs consecutive layers; `run_stack` is the reference implementation."""

    def __call__(  # noqa: D102
        self,
        blocks: Sequence[Block],
        x: Tensor,
        step: Step,
        caches: Caches,
        tables: dict[Rope, RopeTable],
        inputs: Tensor | None = None,
    ) -> Tensor: ...


OnTokens = Callable[[Tensor], None]
"""Receives the tokens `(R,)` of a step while later steps run."""


class WholeSession(Protocol):
    """Runs each step of one generation as a single call; returns None for a step that it does not support."""

    def logits(self, step: Step) -> Tensor | None: ...  # noqa: D102
    def best(  # noqa: D102
        self, step: Step, steps: int, ends: Sequence[int], on_tokens: OnTokens | None
    ) -> Tensor | None: ...


@runtime_checkable
class Draws(Protocol):
    """A whole-step session that can also sample tokens within the step."""

    def drawn(  # noqa: D102
        self,
        step: Step,
        numbers: Tensor,
        noise: RowNoise,
        steps: int,
        ends: Sequence[int],
        on_tokens: OnTokens | None,
    ) -> Tensor | None: ...


@runtime_checkable
class Penalises(Protocol):
    """A whole-step session that can also apply a repetition penalty within the step."""

    def penalised(  # noqa: D102
        self,
        step: Step,
        penalty: RowPenalty,
        numbers: Tensor,
        noise: RowNoise | None,
        steps: int,
        ends: Sequence[int],
        on_tokens: OnTokens | None,
    ) -> Tensor | None: ...


@runtime_checkable
class Suppresses(Protocol):
    """A whole-step session that can also exclude some tokens from being chosen."""

    def suppress(self, tokens: Tensor | None) -> None: ...  # noqa: D102


class Whole(Protocol):
    """Runs whole steps; `begin` returns None if it cannot run the steps of this generation."""

    def begin(self, caches: Caches, longest: int) -> WholeSession | None: ...  # noqa: D102
