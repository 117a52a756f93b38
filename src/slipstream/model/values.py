"""What a module was handed, or answered: the tensors within, and whether they are values and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from slipstream.devices.record import Recorder

__all__ = ["is_plain", "tensors_in", "unseen", "wants_derivatives", "wants_operations"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in its order; what is no tensor, tuple, list or mapping has none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def wants_operations() -> bool:
    """Whether somebody sees each of torch's operations: traces, counts, transforms or differentiates them.

    What a library computes would be missing there, and tensors may have no memory that it could read.
    Autograd, which says so by the tensors, is not asked for here, nor torch.compile, which leaves its graph.
    """
    return (
        forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and _is_seen_by_others())
    )


def _is_seen_by_others() -> bool:
    """Whether a dispatch mode is at work that is not our own."""
    return any(not isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack())


def wants_derivatives(value: Any) -> bool:
    """Whether some of a value's tensors are differentiated by, backwards, or there may be such, forwards."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(value))


@contextmanager
def unseen() -> Iterator[None]:
    """Within, nobody sees torch's operations: what they make is a constant to a trace or a transform."""
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C._DisableFuncTorch(), _disable_current_modes():
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def is_plain(module: nn.Module, x: Any) -> bool:
    """Whether an argument stands for its values alone: no gradients, other dtypes, traces or transforms."""
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or wants_operations():
        return False
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        return False
    return not torch.is_autocast_enabled(x.device.type)
