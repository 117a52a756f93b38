"""Subclasses that bear the name of the class they change: a module gets other code and looks as it did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from slipstream.errors import InjectionError

__all__ = ["become", "deep_twin", "namesake", "trial_copy"]


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


def trial_copy(module: nn.Module, memo: Mapping[int, Any] | None = None) -> Any:
    """A copy of a module to try things on.

    Args:
        module: What a forward with gradients left in its attributes is shared: torch copies no such tensor.
        memo: What else is shared, by its id.

    Raises:
        InjectionError: Something in it cannot be copied.
    """
    held = (value for part in module.modules() for value in vars(part).values())
    left = {id(t): t.detach() for t in held if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(module, {**left, **(memo or {})})
    except Exception as error:  # of whatever code its parts have for it
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise InjectionError(f"{type(module).__name__} cannot be copied to be checked; {said}") from error


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
