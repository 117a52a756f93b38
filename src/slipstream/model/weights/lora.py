"""Adapters kept apart: low-rank products beside the matrices of a live model, which stay bit-identical.

The class of every adapted module becomes a subclass whose forward adds the product, so that models at every
level of injection, and the original code of fused layers, apply it. A fused block gets the products of all
modules that make up one of its matrices as one (`Weight.beside`), in the order of its rows. On several ranks
a product is cut like its matrix: by the rows of `b`, or by the columns of `a` with a sum over the ranks.

Shapes: I input width, O output width, R sum of the ranks of all active adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import WeightError
from slipstream.model.fused.layer_changes import parts_of
from slipstream.model.fused.state import injected_state, is_injected, is_untouched
from slipstream.model.subclass import namesake
from slipstream.model.tensor_parallel.split import is_split, split_of, sum_over_ranks
from slipstream.model.weights.packed import BESIDE, weight_of
from slipstream.ops.linear import Beside, Weight
from slipstream.spec import Role
from slipstream.weights.lora import LowRank
from slipstream.weights.recipe import Piece, gather
from slipstream.weights.slot import TensorSource

__all__ = ["attach", "detach", "is_conv1d", "stays_apart"]

_ORIGINAL = "_slipstream_without_beside"
_READ_OTHERWISE = frozenset({Role.ROUTER, Role.EXPERTS_IN, Role.EXPERTS_OUT, Role.KV_UP})
"""Roles whose matrices are used in other ways than plain products: their adapters have to be merged."""


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, which stores its matrix `(I, O)`."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def stays_apart(model: nn.Module, paths: Iterable[str]) -> frozenset[str]:
    """Return the paths of modules whose adapters need not be merged; the model is only read.

    Adapters must be merged for a block's matrix that is used in another way than as a product, and for an
    embedding.
    """
    merged: set[str] = set()
    for path, layer in _layers(model):
        plans = injected_state(layer).plans
        for plan in (plan for role, plan in plans.items() if role.kind in _READ_OTHERWISE):
            merged |= {f"{path}.{piece.name}" for piece in plan.weight}
    modules = dict(model.named_modules(remove_duplicate=False))
    return frozenset(path for path in paths if f"{path}.weight" not in merged and _multiplies(modules[path]))


def _multiplies(module: nn.Module) -> bool:
    """Whether a module's matrix is only used by its own forward, as a product."""
    # torch's own attention reads the matrix of its output projection without calling the module.
    inside = type(module).__name__ == "NonDynamicallyQuantizableLinear"
    return (isinstance(module, nn.Linear) and not inside) or is_conv1d(module)


def attach(model: nn.Module, pairs: Mapping[str, Sequence[LowRank]]) -> None:
    """Attach low-rank products to a model that has none so far.

    Args:
        model: With or without fused blocks and packed weights.
        pairs: The products to add, by the path of a module that `stays_apart` accepts.

    Raises:
        WeightError: A factor is not finite in the matrix' dtype; nothing has changed.
    """
    made: dict[str, Beside] = {}
    for path, each in pairs.items():
        weight = weight_of(model.get_submodule(path))
        made[path] = _joined(path, each, _dtype_of(weight), _device_of(model, path, weight))
    touched = [layer for _, layer in _layers(model) if is_untouched(layer)]
    for path, beside in made.items():
        module = model.get_submodule(path)
        if BESIDE not in vars(module):  # a module may be reached by two paths
            module.__dict__[BESIDE] = _of_rank(module, beside)
            original: Any = type(module)
            module.__class__ = _adapted_class(original)
    for layer in touched:
        injected_state(layer).parts = parts_of(layer)
    for path, layer in _layers(model):
        _attach_to_block(path, layer, made)


def detach(model: nn.Module) -> None:
    """Remove all low-rank products from a model."""
    touched = [layer for _, layer in _layers(model) if is_untouched(layer)]
    for module in model.modules():
        if BESIDE in vars(module):
            del module.__dict__[BESIDE]
            module.__class__ = vars(type(module))[_ORIGINAL]
    for layer in touched:
        state = injected_state(layer)
        state.parts = parts_of(layer)
    for _, layer in _layers(model):
        block = injected_state(layer).block
        if any(weight.beside is not None for weight in block.weights.matrices.values()):
            plain = {role: replace(w, beside=None) for role, w in block.weights.matrices.items()}
            block.weights = replace(block.weights, matrices=plain)


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if is_injected(module)]


def _attach_to_block(path: str, layer: nn.Module, made: Mapping[str, Beside]) -> None:
    state = injected_state(layer)
    changed: dict[Role, Weight] = {}
    for role, weight in state.block.weights.matrices.items():
        if role.kind in _READ_OTHERWISE:
            continue
        pieces = state.plans[role].weight
        own = {piece.name: made.get(f"{path}.{piece.name}".removesuffix(".weight")) for piece in pieces}
        found = {name: beside for name, beside in own.items() if beside is not None}
        if found:
            beside, columns = _by_rows(layer, pieces, found), state.plans[role].slice.columns
            if columns is not None:
                beside = replace(beside, a=beside.a[:, columns.start : columns.stop].contiguous())
            changed[role] = replace(weight, beside=beside)
    if changed:
        matrices = {**state.block.weights.matrices, **changed}
        state.block.weights = replace(state.block.weights, matrices=matrices)


def _of_rank(module: nn.Module, beside: Beside) -> Beside:
    """Return the part of a product that belongs to a rank's part of a module's matrix."""
    if not is_split(module):
        return beside
    plan, rank = split_of(module)
    cut = plan.cuts.get("weight")
    if cut is None or plan.finish == "gather":  # the joined output is whole
        return beside
    if plan.finish == "sum":
        return replace(beside, a=cut.along(1).of(beside.a, rank).contiguous())
    return replace(beside, b=cut.along(0).of(beside.b, rank).contiguous())


def _by_rows(layer: nn.Module, pieces: Sequence[Piece], found: Mapping[str, Beside]) -> Beside:
    """Join the products of several modules for the matrix made of their rows; each has own columns in `b`."""
    widths = {name: beside.a.shape[0] for name, beside in found.items()}
    total, start = sum(widths.values()), 0
    parts: dict[str, Tensor] = {}
    for name in dict.fromkeys(piece.name for piece in pieces if piece.name):
        some = next(iter(found.values())).b
        turned = next(piece.transposed for piece in pieces if piece.name == name)
        shape = layer.get_parameter(name).shape
        part = some.new_zeros(shape[-1] if turned else shape[-2], total)
        if name in found:
            part[:, start : start + widths[name]] = found[name].b
            start += widths[name]
        parts[name] = part.mT if turned else part
    a = torch.cat([beside.a for name, beside in _in_order(pieces, found)])
    return Beside(a.contiguous(), gather(TensorSource(parts), tuple(pieces)).contiguous())


def _in_order(pieces: Sequence[Piece], found: Mapping[str, Beside]) -> list[tuple[str, Beside]]:
    return [(name, found[name]) for name in dict.fromkeys(p.name for p in pieces) if name in found]


def _joined(path: str, pairs: Sequence[LowRank], dtype: torch.dtype, device: torch.device) -> Beside:
    a = torch.cat([pair.a for pair in pairs]).to(device, dtype)
    b = torch.cat([pair.b.float() * pair.scale for pair in pairs], dim=1).to(device, dtype)
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        raise WeightError(
            f"what the adapter adds to {path} is not finite in {dtype}; no adapter is active now. "
            "Use a wider dtype"
        )
    return Beside(a, b)


def _held_by(model: nn.Module, path: str) -> Weight | None:
    """The matrix of a fused block that contains a module's matrix, or None."""
    for place, layer in _layers(model):
        state = injected_state(layer)
        for role, weight in state.block.weights.matrices.items():
            if any(f"{place}.{piece.name}" == f"{path}.weight" for piece in state.plans[role].weight):
                return weight
    return None


def _dtype_of(weight: Weight) -> torch.dtype:
    return weight.planes[0].dtype if weight.dtype is None else weight.dtype


def _device_of(model: nn.Module, path: str, weight: Weight) -> torch.device:
    """Device of a module's matrix; for a released parameter, that of its block's planes."""
    if not weight.planes[0].is_meta:
        return weight.planes[0].device
    held = _held_by(model, path)
    return torch.device("cpu") if held is None else held.planes[0].device


@functools.cache
def _adapted_class(original: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of a module's class whose forward adds the product; it keeps the original's name."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = original.forward(self, *args, **kwargs)
        x = args[0] if args else kwargs["input"]
        beside: Beside = vars(self)[BESIDE]
        added = beside.of(x)
        # `out` is summed over ranks already, but each rank has only the product of its own inputs.
        return out + (sum_over_ranks(self, added) if is_split(self) else added)

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        original._apply(self, fn, recurse)
        self.__dict__[BESIDE] = vars(self)[BESIDE].apply(fn)
        return self

    return namesake(original, {"forward": forward, "_apply": _apply, _ORIGINAL: original})
