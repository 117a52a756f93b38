"""Subclasses that bear the name of the class they change: a module gets other code and looks as it did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["become", "deep_twin", "namesake"]


def namesake(
    original: type[nn.Module], own: Mapping[str, Any], *, bases: tuple[type[Any], ...] = ()
) -> type[nn.Module]:
    """A subclass that bears the original's name, module and docstring.

    It is made by `type`, which runs `__init_subclass__`: transformers' layers wrap their `forward` there.

    Args:
        original: The class of a live module, whose `__class__` the subclass can become.
        own: Attributes of the subclass: methods by name.
        bases: What it derives from, where that is not the original alone.
    """
    namespace = {"__module__": original.__module__, "__doc__": original.__doc__, **own}
    made: type[nn.Module] = type(original.__name__, bases or (original,), namespace)
    made.__qualname__ = original.__qualname__
    return made


def deep_twin(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What `copy.deepcopy` makes of a module by way of pickling, which such a subclass refuses."""
    memo[id(module)] = twin = type(module).__new__(type(module))
    twin.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return twin


def become(
    model: nn.Module, names: Iterable[str], mark: str, subclass: Callable[..., type[nn.Module]]
) -> None:
    """Let modules become of a subclass of their class, in place; each stays the object it was.

    Args:
        model: What the names are of.
        names: Of the modules. One that has become so before is left as it is.
        mark: An attribute that says so.
        subclass: Makes the subclass of a module's class.
    """
    for name in names:
        module = model.get_submodule(name)
        if mark not in module.__dict__:
            module.__dict__[mark] = True
            module.__class__ = subclass(type(module))
