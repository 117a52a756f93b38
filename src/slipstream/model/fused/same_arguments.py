"""Skips the parsing of a layer's arguments if they are the same as the previous layer's.

A model's loop passes the same mask and angles to each of its layers, and parsing them takes longer than a
small layer does. So a layer whose output is deferred (`defer.py`) records its other arguments in the chain.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.model.block.block import Block
from slipstream.model.fused.defer import Pending, current, join

__all__ = ["follow", "record"]


@dataclass(frozen=True)
class _Arguments:
    """A layer's arguments besides its hidden states.

    Attributes:
        kind: The encoder's kind of its block.
        layer: What else distinguishes layers that parse the same arguments differently.
        args: Positional arguments after the hidden states.
        names: Names of the keyword arguments.
        values: Values of the keyword arguments.
        offset: Difference between the cache index that the call means and the layer's own.
    """

    kind: int | None
    layer: Any
    args: tuple[Any, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    offset: int


def record(
    block: Block, layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor, *, offset: int
) -> None:
    """Record a layer's arguments in its chain, if its output is deferred.

    Args:
        block: The layer's block.
        layer: What distinguishes the layer from layers that parse the same arguments differently.
        args: Positional arguments that the model passed, hidden states first.
        kwargs: Keyword arguments.
        out: The layer's output.
        offset: As in `LayerCall`.
    """
    if args and type(out) is Pending:
        kind = out.chain.encoder.kind(block)
        out.chain.arguments = _Arguments(kind, layer, args[1:], tuple(kwargs), tuple(kwargs.values()), offset)


def follow(
    block: Block, layer: Any, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Defer a layer whose arguments, besides the hidden states, are those of the previous layer.

    `index` is its index in the cache.

    Returns:
        The output, as from `defer`; None where the arguments differ and have to be parsed.
    """
    scope = current()
    if scope is None or not args or type(args[0]) is not Pending:
        return None
    chain = args[0].chain
    arguments: _Arguments | None = chain.arguments
    if (
        arguments is None
        or args[0].count != len(chain.steps)
        or (chain.encoder, chain.drops) != (scope.encoder, scope.drops)
        or layer != arguments.layer
        or chain.encoder.kind(block) != arguments.kind
        or len(args) != 1 + len(arguments.args)
        or tuple(kwargs) != arguments.names
        or not all(map(operator.is_, args[1:], arguments.args))
        or not all(map(operator.is_, kwargs.values(), arguments.values))
        or not chain.again(block, index + arguments.offset)
    ):
        return None
    return join(scope, chain, block)
