"""Notices what was done to a layer after it was fused: a block would pass over hooks and replaced parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["PartState", "is_heard", "is_hooked", "is_intact", "listens_everywhere", "parts_of"]

_KNOWN = frozenset({"slipstream", "transformers"})
"""Packages whose hooks are accounted for: our own, and those that record outputs, which `watch` sees to."""


@dataclass(frozen=True)
class PartState:
    """A module inside of a layer, and the code that it ran when that was fused.

    Attributes:
        module: The part.
        own: A forward set on the object, around its class's, or None.
        forward: Its class's.
    """

    module: nn.Module
    own: Callable[..., Any] | None
    forward: Callable[..., Any]


def parts_of(module: nn.Module) -> tuple[PartState, ...]:
    """The modules inside of a module, as they are now."""
    parts = list(module.modules())[1:]
    return tuple(PartState(part, vars(part).get("forward"), type(part).forward) for part in parts)


def is_intact(module: nn.Module, parts: Sequence[PartState]) -> bool:
    """Whether a module still has the parts that it had, with their code, and nobody listens inside of it.

    Args:
        module: Hooks on itself are left aside, for whoever calls it runs them.
        parts: From `parts_of`, of before.
    """
    now = module.modules()
    next(now)
    same = all(
        next(now, None) is part.module
        and vars(part.module).get("forward") is part.own
        and type(part.module).forward is part.forward
        and not is_hooked(part.module)
        for part in parts
    )
    return same and next(now, None) is None and not listens_everywhere()


def is_hooked(module: nn.Module) -> bool:
    """Whether someone else has put a forward hook on a module."""
    return _foreign(module._forward_hooks, module._forward_pre_hooks)


def is_heard(module: nn.Module) -> bool:
    """Whether anyone but transformers, whose hooks `watch` sees to, has put a forward hook on a module."""
    tables = (module._forward_hooks, module._forward_pre_hooks)
    return any(_package(hook) != "transformers" for table in tables if table for hook in table.values())


def listens_everywhere() -> bool:
    """Whether someone else has put a forward hook on all modules of the process."""
    return _foreign(torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


def _foreign(*tables: dict[int, Any]) -> bool:
    return any(_package(hook) not in _KNOWN for table in tables if table for hook in table.values())


def _package(hook: Any) -> str:
    hook = getattr(hook, "func", hook)  # what a `functools.partial` calls
    name: str = getattr(hook, "__module__", None) or type(hook).__module__
    return name.partition(".")[0]
