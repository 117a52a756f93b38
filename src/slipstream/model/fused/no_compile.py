"""Calls that `torch.compile` leaves as they are.

Traced, a fused layer falls into hundreds of pieces around what no graph holds (native calls, what is asked of
modules and tensors), each of them guarded in every call: eight times the time of the layer itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.model.fused import defer

__all__ = ["as_it_is", "layer_as_it_is", "prepare"]

_made: list[Callable[..., Any]] = []


def prepare() -> None:
    """Make the others ready; not upon import, for it loads torch's compiler, as transformers' models do."""
    if not _made:
        _made.append(torch.compiler.disable(_run))


def as_it_is(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call returns, from within code that is being compiled, which is left for as long."""
    return _made[0](call, *args, **kwargs)


def layer_as_it_is(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same of a layer, whose states are there then: compiled code would read those that are waiting."""
    return _made[0](_now, call, *args, **kwargs)


def _run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _now(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    defer.enter(None, drops=False)
    failed = True
    try:
        answer = call(*args, **kwargs)
        failed = False
        return answer
    finally:
        defer.leave(failed=failed)
