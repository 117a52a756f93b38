"""Subclasses named like the class they derive from: a module gets new code but looks unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from slipstream.errors import InjectionError

__all__ = ["become", "deep_twin", "namesake", "shallow_twin", "trial_copy"]


def namesake(
    original: type[nn.Module], own: Mapping[str, Any], *, bases: tuple[type[Any], ...] = ()
) -> type[nn.Module]:
    """Create a subclass that has the original's name, module and docstring.

    It is created by `type`, which runs `__init_subclass__`: transformers' layers wrap their `forward` there.

    Args:
        original: The class of a live module, to whose `__class__` the subclass can be assigned.
        own: Attributes of the subclass: methods by name.
        bases: Its bases; empty for the original alone.
    """
    namespace = {"__module__": original.__module__, "__doc__": original.__doc__, **own}
    subclass: type[nn.Module] = type(original.__name__, bases or (original,), namespace)
    subclass.__qualname__ = original.__qualname__
    return subclass


def deep_twin(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module as `copy.deepcopy` does, but without pickling, which such a subclass refuses."""
    memo[id(module)] = twin = type(module).__new__(type(module))
    twin.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return twin


def shallow_twin(module: nn.Module) -> nn.Module:
    """Copy a module as `copy.copy` does, but without pickling."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(vars(module))
    return twin


def trial_copy(module: nn.Module, memo: Mapping[int, Any] | None = None) -> Any:
    """Copy a module for trial runs.

    Args:
        module: The module. Non-leaf tensors that a forward with gradients left in its attributes are shared,
            because torch cannot copy them.
        memo: Other objects to share, by id.

    Raises:
        InjectionError: Something in it cannot be copied.
    """
    attributes = (value for part in module.modules() for value in vars(part).values())
    non_leaf = {id(t): t.detach() for t in attributes if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(module, {**non_leaf, **(memo or {})})
    except Exception as error:  # submodules may define arbitrary code for copying
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise InjectionError(f"{type(module).__name__} cannot be copied for its check: {cause}") from error


def become(
    model: nn.Module, names: Iterable[str], mark: str, subclass: Callable[..., type[nn.Module]]
) -> None:
    """Change the class of modules to a subclass, in place; each stays the same object.

    Args:
        model: The model that contains the modules.
        names: Paths of the modules. Modules that already have the mark are left as they are.
        mark: Attribute that marks a module as changed.
        subclass: Creates the subclass of a module's class.
    """
    for name in names:
        module = model.get_submodule(name)
        if mark not in module.__dict__:
            module.__dict__[mark] = True
            module.__class__ = subclass(type(module))
