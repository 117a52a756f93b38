"""`injection_policy`: layer classes named by the user, each with its output linears or a family of its own.

The whole policy is checked against the model before any work starts; a name that matches nothing is an error.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.families import Family

__all__ = ["Policy", "check_policy", "target_of"]

Policy = Mapping[type[nn.Module], Any]
"""By layer class: a `Family`, the path suffix of an output linear, or several such suffixes."""


def target_of(policy: Policy | None, layer_class: type) -> Family | tuple[str, ...] | None:
    """Return the policy's entry for the nearest class along a layer class's MRO, or None."""
    if not policy:
        return None
    target = next((policy[c] for c in layer_class.__mro__ if c in policy), None)
    if target is None or isinstance(target, Family):
        return target
    return (target,) if isinstance(target, str) else tuple(target)


def check_policy(model: nn.Module, policy: Policy | None) -> None:
    """Check that a policy matches the model.

    Raises:
        ConfigError: A class does not occur in the model, a name matches no linear of its class, or a value is
            neither names nor a family.
    """
    for layer_class, target in (policy or {}).items():
        layers = [module for module in model.modules() if isinstance(module, layer_class)]
        if not layers:
            raise ConfigError(
                f"injection_policy names {layer_class.__name__}, but {type(model).__name__} has no such "
                f"layer; {_repeated(model)}"
            )
        if not isinstance(target, Family):
            _check_names(layer_class, layers, target)


def _check_names(layer_class: type[nn.Module], layers: Iterable[nn.Module], target: object) -> None:
    """Check that each name matches a linear in some layer of the class."""
    names = [target] if isinstance(target, str) else target
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"injection_policy maps {layer_class.__name__} to a {type(target).__name__}; give the names of "
            "its output linears, or a slipstream.families.Family"
        )
    linears = sorted({name for layer in layers for name in _linears(layer)})
    for suffix in names:
        if not any(_ends_in(name, suffix) for name in linears):
            near = ", ".join(map(repr, _near(suffix, linears)))
            raise ConfigError(
                f"injection_policy names {suffix!r} for {layer_class.__name__}, but no linear of it has that "
                f"name; {f'similar names: {near}' if near else 'it has no linears at all'}"
            )


def _ends_in(name: str, suffix: str) -> bool:
    return f".{name}".endswith(f".{suffix.lstrip('.')}")


def _linears(layer: nn.Module) -> Iterable[str]:
    """Yield the paths of modules with a matrix as `weight`, transposed or not, except embeddings."""
    for name, module in layer.named_modules():
        weight = module._parameters.get("weight")
        if name and weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            yield name


def _near(suffix: str, names: list[str]) -> list[str]:
    """Return up to five names that were most likely meant."""
    last = suffix.rpartition(".")[2]
    ends = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = difflib.get_close_matches(suffix, names, 3, 0.4)
    near += [ends[end] for end in difflib.get_close_matches(last, ends, 3, 0.4)]
    return list(dict.fromkeys(near or names))[:5]


def _repeated(model: nn.Module) -> str:
    """Describe the classes that occur more than once and have submodules."""
    counts = Counter(type(m).__name__ for m in model.modules() if any(True for _ in m.children()))
    names = [f"{name} ({count})" for name, count in counts.most_common() if count > 1]
    names = [name for name in names if not name.startswith(("ModuleList ", "Sequential "))]
    return f"its repeated layers: {', '.join(names)}" if names else "it has no repeated layers"
