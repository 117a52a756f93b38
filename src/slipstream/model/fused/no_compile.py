"""Calls that `torch.compile` does not trace.

When traced, a fused layer breaks into hundreds of graphs around what no graph can contain (native calls,
checks of modules and tensors), with guards on each of them in every call: eight times the time of the layer
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.model.fused import defer

__all__ = ["as_it_is", "layer_as_it_is", "prepare"]

_made: list[Callable[..., Any]] = []


def prepare() -> None:
    """Prepare the functions below; not at import, because this loads torch's compiler, as models also do."""
    if not _made:
        _made.append(torch.compiler.disable(_run))


def as_it_is(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a call untraced from within code that is being compiled, by a graph break."""
    return _made[0](call, *args, **kwargs)


def layer_as_it_is(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer untraced and not deferred, because compiled code would read a deferred state's NaN."""
    return _made[0](_now, call, *args, **kwargs)


def _run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _now(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    defer.enter(None, drops=False)
    failed = True
    try:
        result = call(*args, **kwargs)
        failed = False
        return result
    finally:
        defer.leave(failed=failed)
