"""Layers that are handed what the layer before them was: their arguments are not read again.

A model's loop hands each of its layers the same mask and the same angles, and reading them takes longer than
a small layer. A layer whose states are waiting (`defer.py`) leaves word of what it was handed beside them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.model.block.block import Block
from slipstream.model.fused.defer import Pending, current, join

__all__ = ["follow", "tell"]


@dataclass(frozen=True)
class _Told:
    """What a layer was handed beside its states.

    Attributes:
        kind: Of its block, by the encoder.
        layer: What else tells layers apart.
        args: Behind the states.
        names: Of the keywords.
        values: Of the keywords.
        offset: Between a layer's own place in the cache and that which was meant.
    """

    kind: int | None
    layer: Any
    args: tuple[Any, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    offset: int


def tell(
    block: Block, layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor, *, offset: int
) -> None:
    """Leave word of what a layer was handed, if its states are waiting.

    Args:
        block: The layer's.
        layer: What tells it from layers that read the same arguments otherwise.
        args: What the model passed, states first.
        kwargs: By name.
        out: The states that it returns.
        offset: As `LayerCall` has it.
    """
    if args and type(out) is Pending:
        kind = out.chain.encoder.kind(block)
        out.chain.told = _Told(kind, layer, args[1:], tuple(kwargs), tuple(kwargs.values()), offset)


def follow(
    block: Block, layer: Any, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The states of a layer that is handed what the one before it was, as `defer` returns them.

    `index` is its place in the cache.

    Returns:
        None where it is not, so that its arguments have to be read.
    """
    scope = current()
    if scope is None or not args or type(args[0]) is not Pending:
        return None
    chain = args[0].chain
    told: _Told | None = chain.told
    if (
        told is None
        or args[0].count != len(chain.steps)
        or (chain.encoder, chain.drops) != (scope.encoder, scope.drops)
        or layer != told.layer
        or chain.encoder.kind(block) != told.kind
        or len(args) != 1 + len(told.args)
        or tuple(kwargs) != told.names
        or not all(map(operator.is_, args[1:], told.args))
        or not all(map(operator.is_, kwargs.values(), told.values))
        or not chain.again(block, index + told.offset)
    ):
        return None
    return join(scope, chain, block)
