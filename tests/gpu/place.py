"""Where the GPU's kernels run in these tests: on a GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.triton.target import interpreted
from slipstream.ops.linear import Weight

__all__ = ["DEVICE", "place"]

DEVICE = torch.device("cpu" if interpreted() or not torch.cuda.is_available() else "cuda")


def place(value: Any) -> Any:
    """A kernel's argument on that device: a tensor, a weight, a step, a mask, or something else."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, Weight):
        return value.apply(lambda tensor: tensor.to(DEVICE))
    if isinstance(value, tuple):
        return tuple(place(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        tensors = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{n: t.to(DEVICE) for n, t in tensors.items() if isinstance(t, Tensor)})
    return value
