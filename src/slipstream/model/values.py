"""Inspects a module's arguments and results: the tensors in them, and whether only their values matter."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from slipstream.devices.record import Recorder

__all__ = [
    "is_plain",
    "moved_to",
    "promoted",
    "tensors_in",
    "unseen",
    "wants_derivatives",
    "wants_operations",
    "writes_into",
]

_HARMLESS = frozenset({"requires_grad_", "share_memory_"})
"""Functions named like in-place ones that leave a tensor's values as they are."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value in order, searching tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def wants_operations() -> bool:
    """Whether torch's operations are being observed: traced, counted, transformed or differentiated.

    The observer would miss what a native library computes, and tensors may have no memory to read from.
    Autograd is not covered here, because tensors themselves show it, nor is torch.compile, which breaks its
    graph instead.
    """
    return (
        forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and _is_seen_by_others())
        or (torch._C._len_torch_function_stack() > 0 and _is_overridden())
    )


def _is_overridden() -> bool:
    """Whether a function mode other than a default device is active."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _is_seen_by_others() -> bool:
    """Whether a dispatch mode other than `Recorder` is active."""
    return any(not isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack())


def wants_derivatives(value: Any) -> bool:
    """Whether a value's tensors require gradients, or forward-mode differentiation is active."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(value))


@contextmanager
def unseen() -> Iterator[None]:
    """Hide torch's operations from traces, transforms and modes, to which their results are constants."""
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C._DisableFuncTorch(), _disable_current_modes():
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def is_plain(module: nn.Module, x: Any) -> bool:
    """Whether only the values of an argument matter: no gradients, autocast, traces or transforms."""
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or wants_operations():
        return False
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        return False
    return not torch.is_autocast_enabled(x.device.type)


def writes_into(
    kind: type[Tensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call that reached `__torch_function__` writes into a tensor of a class.

    That is in place, as `add_`, `_foreach_add_` and item assignment do, or by `out`.
    """
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    written = args[:1] if in_place and name not in _HARMLESS else ()
    return any(isinstance(t, kind) for t in tensors_in((written, kwargs.get("out"))))


def promoted(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments with `inputs_embeds` in the model's dtype, if that is the wider one.

    The original's first layers round to their dtype before a weight promotes them; fused ones would keep it.
    """
    x = given.get("inputs_embeds")
    dtype = (
        getattr(model, "dtype", None) if isinstance(x, Tensor) else None
    )  # it looks through the parameters
    if not isinstance(x, Tensor) or not isinstance(dtype, torch.dtype) or x.dtype == dtype:
        return given
    widens = x.is_floating_point() and torch.promote_types(x.dtype, dtype) == dtype
    return {**given, "inputs_embeds": x.to(dtype)} if widens else given


def moved_to(value: Any, place: torch.device) -> Any:
    """Return nested tuples, lists and dictionaries with their tensors moved to a device.

    Containers in which nothing has to move are returned themselves: a model may write into the caller's.
    """
    if isinstance(value, Tensor):
        return value.to(place)
    kind = type(value)
    if kind in (tuple, list):
        moved = [moved_to(v, place) for v in value]
        return value if all(map(operator.is_, moved, value)) else kind(moved)
    if kind is dict:
        changed = {key: moved_to(v, place) for key, v in value.items()}
        return value if all(map(operator.is_, changed.values(), value.values())) else changed
    return value
