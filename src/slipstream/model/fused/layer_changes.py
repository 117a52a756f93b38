"""Detects changes to a layer after it was fused, such as hooks and new modules; a block would ignore them."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = [
    "Absent",
    "Numbers",
    "PartState",
    "Parts",
    "absent_of",
    "has_hooks",
    "is_hooked",
    "is_intact",
    "has_global_hooks",
    "modules_of",
    "numbers_of",
    "parts_of",
    "unhooked",
]

_KNOWN = frozenset({"slipstream", "transformers"})
"""Packages whose hooks are accounted for: Slipstream's, and transformers', which `watch` handles."""

_IDLE = frozenset(
    {
        "_is_hf_initialized",
        "gradient_checkpointing",
        "hidden_size",
        "intermediate_size",
        "layer_idx",
        "training",
        "vocab_size",
    }
)
"""Attributes that do not affect a forward, or whose change is detected in another way."""

_PLAIN = (bool, int, float, str, FunctionType, BuiltinFunctionType)
_TORCHS_OWN = frozenset(vars(nn.Module()))

_OWN = operator.attrgetter("__dict__")
_PARAMETERS = operator.attrgetter("_parameters")
_GET: Callable[[Any, Any], Any] = dict.get
_STATE_OF = operator.itemgetter("_modules", "_forward_hooks", "_forward_pre_hooks")

Children = tuple[nn.Module | None, ...]


@dataclass(frozen=True)
class PartState:
    """A module inside a layer, with the code and the children that it had when the layer was fused.

    The layer is intact as long as they are the same and nobody else has put a forward hook on the module.

    Attributes:
        module: The module.
        own: A `forward` set on the object, overriding its class's, or None.
        forward: Its class's `forward`.
        children: Its direct submodules.
    """

    module: nn.Module
    own: Callable[..., Any] | None
    forward: Callable[..., Any]
    children: Children


@dataclass(frozen=True)
class Numbers:
    """Attributes that modules compute with, such as a scale, a norm's epsilon, a mode or a function.

    Attributes:
        modules: The module of each attribute.
        names: Name of each attribute.
        values: Value of each attribute; containers are copies.
    """

    modules: tuple[nn.Module, ...] = ()
    names: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()

    def hold(self) -> bool:
        """Whether all attributes still have the same values."""
        now = tuple(map(_GET, map(_OWN, self.modules), self.names))
        try:
            return now == self.values
        except RuntimeError:  # an attribute is now a tensor with several elements
            return False


@dataclass(frozen=True)
class Absent:
    """Parameters that are registered as None, such as the bias of a linear without one.

    Attributes:
        modules: The module of each parameter.
        names: Name of each parameter.
    """

    modules: tuple[nn.Module, ...] = ()
    names: tuple[str, ...] = ()

    def hold(self) -> bool:
        """Whether all of them are still None."""
        now = map(_GET, map(_PARAMETERS, self.modules), self.names)
        return not any(map(operator.is_not, now, repeat(None)))


@dataclass(frozen=True)
class Parts:
    """The contents of a layer at one point in time.

    Attributes:
        children: The layer's direct submodules.
        inside: All modules inside it, at any depth.
        places: The modules with a `layer_idx`, possibly the layer itself, and its value, by which the cache
            is addressed.
        numbers: Numeric attributes of the layer and all modules inside it.
        absent: Absent parameters of the layer and all modules inside it.
    """

    children: Children = ()
    inside: tuple[PartState, ...] = ()
    places: tuple[tuple[nn.Module, Any], ...] = ()
    numbers: Numbers = Numbers()
    absent: Absent = Absent()


def modules_of(module: nn.Module, closed: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return `list(module.modules())` in another order, in a tenth of the time: 0.1 ms for 400 modules.

    Args:
        module: The root.
        closed: Modules that are listed without the modules inside them.
    """
    unopened = set(closed)
    seen, queue = {module}, [module]
    for one in queue:
        if one in unopened:
            continue
        for child in one._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return queue


def parts_of(module: nn.Module) -> Parts:
    """Record the current contents of a module."""
    inside = modules_of(module)
    states = (
        PartState(part, vars(part).get("forward"), type(part).forward, _children(part)) for part in inside[1:]
    )
    places = ((part, vars(part)["layer_idx"]) for part in inside if "layer_idx" in vars(part))
    return Parts(_children(module), tuple(states), tuple(places), numbers_of(inside), absent_of(inside))


def absent_of(modules: Iterable[nn.Module]) -> Absent:
    """Record the parameters of modules that are currently None."""
    absent = [(one, name) for one in modules for name, p in one._parameters.items() if p is None]
    return Absent(*zip(*absent, strict=True)) if absent else Absent()


def numbers_of(modules: Iterable[nn.Module]) -> Numbers:
    """Record the attributes of modules that are numbers, strings, functions, or containers of those."""
    found = list[tuple[nn.Module, str, Any]]()
    for module in modules:
        kind: Any = type(module)
        idle, kinds = _IDLE | _written(kind), _kinds(module)
        for name, value in vars(module).items():
            if name in idle or "drop" in name:
                continue
            if type(value) in kinds:
                found.append((module, name, value))
            elif bool in kinds and _is_plain_container(name, value):
                found.append((module, name, copy.copy(value)))  # it may be changed in place
    return Numbers(*zip(*found, strict=True)) if found else Numbers()


def _is_plain_container(name: str, value: Any) -> bool:
    """Whether an attribute is a list, a dictionary or the like of numbers, strings and functions alone."""
    if type(value) not in (dict, list, set, tuple) or name in _TORCHS_OWN:
        return False
    items = value.values() if type(value) is dict else value
    return all(type(item) in _PLAIN for item in items)


@functools.cache
def _written(kind: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that a class assigns outside `__init__`, such as a router's token counts."""
    own: tuple[Any, ...] = kind.__mro__[: kind.__mro__.index(nn.Module)]
    methods = (value for one in own for name, value in vars(one).items() if name != "__init__")
    code = (getattr(inspect.unwrap(method), "__code__", None) for method in methods if callable(method))
    steps = (step for one in code if one is not None for step in dis.get_instructions(one))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def _kinds(module: nn.Module) -> tuple[type, ...]:
    """Return the types of attributes to track: in torch's modules only floats, in dropout modules none."""
    if not type(module).__module__.startswith("torch.nn."):
        return _PLAIN
    return () if isinstance(module, nn.modules.dropout._DropoutNd) else (float,)


def is_intact(module: nn.Module, parts: Parts) -> bool:
    """Whether a module's contents, code and `layer_idx` are unchanged, and no one has hooks inside it.

    Args:
        module: The module. Hooks on the module itself are ignored, because its caller runs them.
        parts: Earlier result of `parts_of`.
    """
    if _children(module) != parts.children or has_global_hooks():
        return False
    if not parts.numbers.hold() or not parts.absent.hold():
        return False
    for one, place in parts.places:
        if one.__dict__.get("layer_idx") != place:
            return False
    # One loop without function calls, as this runs for every layer of every forward.
    for part in parts.inside:
        inner, hooks, pre_hooks = _STATE_OF(values := part.module.__dict__)
        if (
            values.get("forward") is not part.own
            or type(part.module).forward is not part.forward
            or tuple(inner.values()) != part.children
            or ((hooks or pre_hooks) and _foreign(hooks, pre_hooks))
        ):
            return False
    return True


def _children(module: nn.Module) -> Children:
    return tuple(module._modules.values())


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has a forward hook that is neither Slipstream's nor transformers'."""
    values = module.__dict__
    hooks, pre_hooks = values["_forward_hooks"], values["_forward_pre_hooks"]
    return bool(hooks or pre_hooks) and _foreign(hooks, pre_hooks)


@contextmanager
def unhooked(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context, remove forward hooks that are neither Slipstream's nor transformers'."""
    tables = [table for one in modules for table in (one._forward_hooks, one._forward_pre_hooks)]
    before = [dict(table) for table in tables]
    try:
        for table, hooks in zip(tables, before, strict=True):
            for key, hook in hooks.items():
                if _package(hook) not in _KNOWN:
                    del table[key]
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has a forward hook that is not transformers', whose hooks `watch` handles."""
    tables = (module._forward_hooks, module._forward_pre_hooks)
    return any(_package(hook) != "transformers" for table in tables if table for hook in table.values())


def has_global_hooks() -> bool:
    """Whether there is a global forward hook that is neither Slipstream's nor transformers'."""
    hooks, pre_hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return bool(hooks or pre_hooks) and _foreign(hooks, pre_hooks)


def _foreign(*tables: dict[int, Any]) -> bool:
    return any(_package(hook) not in _KNOWN for table in tables if table for hook in table.values())


def _package(hook: Any) -> str:
    hook = getattr(hook, "func", hook)  # unwraps a `functools.partial`
    name: str = getattr(hook, "__module__", None) or type(hook).__module__
    return name.partition(".")[0]
