"""What a module was handed, or answered: the tensors within, and whether one is its values and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["is_plain", "tensors_in"]


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


def is_plain(module: nn.Module, x: Any) -> bool:
    """Whether an argument stands for its values alone: no gradients, other dtypes, traces or transforms."""
    if (
        not isinstance(x, Tensor)
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
    ):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        return False
    return not torch.is_autocast_enabled(x.device.type) and torch._C._functorch.maybe_current_level() is None
