"""Gathers packed weights from several ranks, one layer at a time, into the form that one process holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from slipstream.engine.settings import format_named
from slipstream.errors import UnsupportedError
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.weights.packed import is_packed, packed_matrices, put_matrix
from slipstream.ops.linear import Weight
from slipstream.parallel import Axis
from slipstream.weights.load import BlockWeights, restore_block
from slipstream.weights.packed_folder import Matrix
from slipstream.weights.ranks import rejoined

__all__ = ["gathered_tensors", "is_any_packed"]

Kind = tuple[str, bool, int]
"""Of a packed tensor: its format, whether it is stored transposed, and an id shared by tied tensors."""


def is_any_packed(model: nn.Module) -> bool:
    """Whether any of a model's weights is packed."""
    blocks = (injected_state(part).block.weights for part in model.modules() if is_injected(part))
    modules = (packed_matrices(part).values() for part in model.modules() if is_packed(part))
    weights = [weight for held in blocks for weight in held.matrices.values()]
    return any(w.format != "plain" for w in (*weights, *(weight for own in modules for weight, _ in own)))


def gathered_tensors(model: nn.Module, replica: Axis) -> tuple[dict[str, Matrix], dict[str, Tensor]]:
    """Return the packed matrices and all other tensors of a model on several ranks, by the model's names.

    All ranks must make this call. Each layer's parts are unpacked to float32, joined, and packed again by the
    first rank. That reproduces the original planes, because packing what a format unpacked gives the same
    planes. Only the current layer is unpacked at any time.

    Returns:
        The tensors on the first rank; nothing on the others.
    """
    matrices: dict[str, Matrix] = {}
    plain: dict[str, Tensor] = {}
    made: dict[int, Matrix] = {}
    for path, part in _units(model, ""):
        kinds, state = _unpacked(path, part)
        if replica.rank:
            continue
        for name, (named, transposed, place) in kinds.items():
            dense = state.pop(name)
            if place not in made:
                packed = format_named(named)
                weight = packed.weight(dense.mT.contiguous() if transposed else dense, None)
                made[place] = Matrix(weight, transposed=transposed)
            matrices[name] = made[place]
        plain |= state
    first = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return matrices, {name: tensor for name, tensor in plain.items() if name in first}


def _units(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units to gather one after another: fused layers, and modules that contain none."""
    if is_injected(module) or not any(is_injected(part) for part in module.modules()):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _units(child, f"{path}.{name}" if path else name)
    own = nn.Module()
    own._parameters, own._buffers = module._parameters, module._buffers
    own._non_persistent_buffers_set = module._non_persistent_buffers_set
    yield path, own


def _unpacked(path: str, part: nn.Module) -> tuple[dict[str, Kind], dict[str, Tensor]]:
    """Return the kinds of a unit's packed tensors, and all its tensors whole, the packed ones in float32."""
    head = f"{path}." if path else ""
    kinds: dict[str, Kind] = {}
    for inside, module in part.named_modules(prefix=path):
        for name, (weight, transposed) in (packed_matrices(module) if is_packed(module) else {}).items():
            if weight.format != "plain":  # a plain one has rows of a vocabulary that is split over ranks
                full = f"{inside}.{name}" if inside else name
                kinds[full] = (weight.packed_as, transposed, weight.planes[0].data_ptr())
    with _in_float32(part):
        state: dict[str, Tensor] = part.state_dict(prefix=head)
    if is_injected(part):
        names, tensors = _of_block(part)
        kinds |= {head + name: kind for name, kind in names.items()}
        state |= {head + name: tensors[name].view(state[head + name].shape) for name in names}
    return kinds, state


def _of_block(layer: nn.Module) -> tuple[dict[str, Kind], Mapping[str, Tensor]]:
    """Return the kinds of a fused layer's packed tensors, and these tensors whole, in float32."""
    held = injected_state(layer)
    packed = {role: w for role, w in held.block.weights.matrices.items() if w.dtype is not None}
    share = held.block.share
    if share is not None and any(piece.experts for role in packed for piece in held.whole[role].weight):
        raise UnsupportedError(
            f"the packed experts of {type(layer).__name__} are flat matrices, which are not gathered from "
            f"{share.mesh.replica.size} ranks; save the packed model from one process"
        )
    names = {
        piece.name: (weight.packed_as, piece.transposed, id(piece))
        for role, weight in packed.items()
        for piece in held.whole[role].weight
    }
    wide = {role: replace(_widened(weight), bias=None) for role, weight in packed.items()}
    plans = {role: replace(held.whole[role], bias=()) for role in packed}

    def like(name: str) -> Tensor:
        return torch.empty_like(layer.get_parameter(name), dtype=torch.float32, device="meta")

    with nullcontext() if held.block.weights.lease is None else held.block.weights.lease:
        if share is None:
            return names, restore_block(BlockWeights(wide, {}), plans)
        return names, rejoined(BlockWeights(wide, {}), plans, share, like)


@contextmanager
def _in_float32(part: nn.Module) -> Iterator[None]:
    """Make packed modules unpack to float32 within the context."""
    before = [
        (module, name, weight)
        for module in part.modules()
        if is_packed(module)
        for name, (weight, _) in packed_matrices(module).items()
    ]
    try:
        for module, name, weight in before:
            put_matrix(module, name, _widened(weight))
        yield
    finally:
        for module, name, weight in before:
            put_matrix(module, name, weight)


def _widened(weight: Weight) -> Weight:
    """Return a weight with the same planes that unpacks to float32."""
    return weight.apply(lambda t: t.float() if t.is_floating_point() and not t.numel() else t)
