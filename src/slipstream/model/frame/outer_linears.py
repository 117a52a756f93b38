"""Large linears outside fused layers, above all the vocabulary projection, run the bound op on few rows.

So do those of the parts of fused layers that run their own code, such as state spaces and convolutions.

The module keeps its identity and its own current tensors; its class becomes a subclass, as for parts of
layers (`parts/parts.py`). torch multiplies few rows by a large matrix at half of the memory bandwidth or
less, and leaves spinning threads that compete with the library's: one row times 49152 x 576 in bfloat16 takes
torch 3.5 ms, and the library 1.2.

Shapes: I input width, O output width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.formats import FORMATS
from slipstream.model.fuse import Settings
from slipstream.model.fused.defer import is_plain_run
from slipstream.model.fused.layer_changes import parts_of
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.layers import Found
from slipstream.model.parts.parts import is_swapped, swap
from slipstream.model.selfcheck.proof import disagreement
from slipstream.model.weights.packed import is_packed
from slipstream.ops.linear import Weight

__all__ = ["MOST_ROWS", "swap_around"]

log = logging.getLogger(__name__)

MOST_ROWS = 32
"""Maximum number of rows; with more, torch is as fast in 16 bits."""

_LEAST_BYTES = 1 << 20
"""Minimum bytes of a matrix; a smaller product takes microseconds, and calling the library costs some."""

_PROOF = 1 << 17
"""Bytes of rows, from both ends of a matrix, that are multiplied in the check: enough to use the library."""


def swap_around(
    model: nn.Module,
    layers: Sequence[Found],
    settings: Settings,
    alone: Callable[[], AbstractContextManager[None]],
) -> None:
    """Swap the linears of a model outside its blocks; those that fail the check stay as they are.

    Args:
        model: In the engine's dtype and on its device.
        layers: The layers that were examined.
        settings: Provides the implementations.
        alone: Makes a context in which torch uses only the calling thread. In it run calls of few rows of
            layers with parts that run their own code: the threads that torch leaves spinning after each
            small operation would keep the library's threads off the processors.
    """
    bound = settings.bind(None).linear
    inside = {id(part) for found in layers for part in found.layer.modules()}
    inside -= {id(part) for found in layers for part in _own_modules(found)}
    if bound.name == "reference" or settings.device.type != "cpu":
        return
    for name, module in model.named_modules():
        if id(module) in inside or not _serves(module, settings.dtype):
            continue
        error = _prove(module, bound.run)
        if error is None:
            log.warning("%s runs its own code: the product by %s is wrong", name, bound.name)
        else:
            swap(module, _Around(bound.run))

    def scope(states: Tensor) -> AbstractContextManager[None]:
        return alone() if states.numel() <= MOST_ROWS * states.shape[-1] else nullcontext()

    for found in layers:
        parts = _own_modules(found)
        if not parts or not is_injected(found.layer):
            continue
        state = injected_state(found.layer)
        state.parts = parts_of(found.layer)
        if not any(_serves(part, settings.dtype) for part in parts):
            state.scope = scope


def _own_modules(found: Found) -> list[nn.Module]:
    """Return the modules in the parts of a layer that run their own code."""
    if found.family is None or found.spec is None:
        return []
    inside = dict(found.layer.named_modules())  # some layers of a family lack a part
    paths = (path for path in found.family.own_parts(found.spec) if path in inside)
    return [module for path in paths for module in inside[path].modules()]


def _serves(module: nn.Module, dtype: torch.dtype) -> bool:
    weight = module._parameters.get("weight")
    return (
        type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and not (is_packed(module) or is_swapped(module))
        and weight is not None
        and weight.dtype == dtype
        and weight.device.type == "cpu"
        and weight.nbytes >= _LEAST_BYTES
    )


def _prove(module: nn.Module, run: Callable[[Tensor, Weight], Tensor]) -> float | None:
    """Return the largest error for the first and last rows of a matrix; None if it exceeds rounding."""
    own: Any = module._parameters["weight"]
    edge = 1 + _PROOF // 2 // (own.shape[1] * own.itemsize)
    rows = torch.cat((own[:edge], own[-edge:])).detach()
    x = torch.randn(
        3, rows.shape[1], dtype=torch.float32, generator=torch.Generator().manual_seed(0), device="cpu"
    ).to(rows)
    # Scaled so that products are near one, which the bound of `disagreement` assumes.
    rows = rows / rows.float().square().sum(1).mean().sqrt().clamp(min=1e-6).to(rows)
    return disagreement(F.linear(x, rows), run(x, FORMATS["plain"].weight(rows, None)))


@dataclass(frozen=True)
class _Around:
    """Runs a swapped linear on the module's own current parameters."""

    run: Callable[[Tensor, Weight], Tensor]

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        weight: Any = module.weight
        bias: Any = module.bias
        if (
            type(x) is not Tensor
            or x.dtype != weight.dtype
            or x.shape[-1] != weight.shape[1]
            or not is_plain_run(x)
            or not 0 < x.numel() <= MOST_ROWS * weight.shape[1]
        ):
            return F.linear(x, weight, bias)
        rows = self.run(x.reshape(-1, x.shape[-1]), FORMATS["plain"].weight(weight, bias))
        return rows.view(*x.shape[:-1], weight.shape[0])
