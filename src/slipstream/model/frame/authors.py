"""Detects custom code around a model's layers.

A family describes what transformers' classes do, and a run on a few tokens confirms that a model behaves like
one of them. For custom code such a run proves nothing: it may behave differently for one token, or in a later
step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["is_ours", "own_code", "own_method"]

_KNOWN = frozenset({"builtins", "slipstream", "torch", "transformers"})


def own_code(model: nn.Module, layers: Iterable[nn.Module], name: str = "the model") -> str | None:
    """Describe code around a model's layers that is neither transformers' nor torch's; None if there is none.

    Args:
        model: The model.
        layers: Its layers, which are not searched, nor the modules inside them.
        name: Name of the model itself in the description.
    """
    closed, queue = set(layers), [("", model)]
    for path, module in queue:
        if module in closed:
            continue
        closed.add(module)
        if (method := own_method(module)) is not None:
            return f"{path or name} ({type(module).__name__}) has a custom {method}"
        inside = ((f"{path}.{key}" if path else key, child) for key, child in module._modules.items())
        queue += [(key, child) for key, child in inside if child is not None]
    return None


def own_method(module: nn.Module) -> str | None:
    """Return the name of a method of a module that is neither transformers' nor torch's; None if none is."""
    kind: Any = type(module)
    return "forward" if "forward" in vars(module) else _written(kind, kind.forward)


def is_ours(method: Any) -> bool:
    """Whether a function, a property or a wrapper is known code: transformers', torch's or Slipstream's."""
    inner = (getattr(method, name, None) for name in ("fget", "func", "__func__"))
    within = next((one for one in inner if one is not None), None)
    if within is not None:
        return is_ours(within)
    return (getattr(method, "__module__", None) or "").partition(".")[0] in _KNOWN


@functools.cache
def _written(kind: type[nn.Module], forward: Callable[..., Any]) -> str | None:
    """Return the name of a method that custom code overrides; `forward` is the class's current one."""
    if not is_ours(forward):
        return "forward"
    for place, one in enumerate(kind.__mro__):
        if one.__module__.partition(".")[0] in _KNOWN:
            continue
        inherited = {name for base in kind.__mro__[place + 1 :] for name in vars(base)}
        for name in sorted(inherited.intersection(vars(one))):
            value, is_own = vars(one)[name], name == "__call__" or not name.startswith("__")
            if is_own and _is_code(value) and not is_ours(value):
                return name
    return None


def _is_code(value: Any) -> bool:
    kinds = (property, staticmethod, classmethod)
    return isinstance(value, kinds) or (callable(value) and not isinstance(value, type))
