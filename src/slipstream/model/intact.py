"""Notices what was done to a layer after it was fused: a block would pass over hooks and replaced parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = ["is_hooked", "is_intact"]

_KNOWN = frozenset({"slipstream", "transformers"})
"""Packages whose hooks are accounted for: our own, and those that record outputs, which `watch` sees to."""


def is_intact(module: nn.Module, parts: Sequence[nn.Module]) -> bool:
    """Whether a module still has the parts that it had, and nobody listens inside of it.

    Args:
        module: Hooks on itself are left aside, for whoever calls it runs them.
        parts: `tuple(module.modules())[1:]` of before.
    """
    now = module.modules()
    next(now)
    return all(next(now, None) is part and not is_hooked(part) for part in parts) and next(now, None) is None


def is_hooked(module: nn.Module) -> bool:
    """Whether someone else has put a forward hook on a module."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(_package(hook) not in _KNOWN for hook in hooks)


def _package(hook: Any) -> str:
    hook = getattr(hook, "func", hook)  # what a `functools.partial` calls
    name: str = getattr(hook, "__module__", None) or type(hook).__module__
    return name.partition(".")[0]
