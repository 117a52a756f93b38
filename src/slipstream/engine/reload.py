"""Loads another checkpoint's weights into an existing engine, in place: all of them, or none.

Every tensor's name, shape and values are checked first. Then each is written to the old one's memory, so
everything that is bound to addresses (blocks, native structs, captured graphs) stays valid.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.engine.admit import check_value
from slipstream.engine.loading import matched
from slipstream.engine.settings import PASSES, format_named
from slipstream.errors import UnsupportedError, WeightError
from slipstream.formats import FORMATS, VARIANTS
from slipstream.model.fused.state import injected_state, is_injected, is_untouched
from slipstream.model.tensor_parallel.split import is_split
from slipstream.model.weights.packed import is_packed, packed_matrices
from slipstream.model.weights.refresh import refresh, tied_by_transformers
from slipstream.model.weights.slots import packed_names, refuse_streamed, tied_names, wholes_of
from slipstream.ops.linear import Weight
from slipstream.parallel import ALONE, Axis
from slipstream.parallel.agree import agree_on_values
from slipstream.weights.checkpoint import Slices, open_checkpoint
from slipstream.weights.match import Renamed
from slipstream.weights.packed_folder import MANIFEST, is_packed_folder
from slipstream.weights.recipe import Piece, gather
from slipstream.weights.source import Source

__all__ = ["reload"]


def reload(
    model: nn.Module,
    place: str | os.PathLike[str],
    *,
    tag: str | None,
    strict: bool,
    axis: Axis = ALONE.replica,
) -> None:
    """Write a checkpoint's values into an engine's model.

    Args:
        model: The model, with fused and packed parts.
        place: The checkpoint, as in the configuration's `checkpoint`.
        tag: One of a folder's tags.
        strict: False accepts missing tensors, whose weights then stay unchanged, and surplus ones.
        axis: The ranks that each have a part of the model; all of them must make this call.

    Raises:
        WeightError: The checkpoint cannot be read, is not this model's, or holds packed weights.
        UnsupportedError: A layer's parts were replaced since it was fused.
    """
    if axis.size > 1:
        _on_ranks(model, place, tag=tag, strict=strict, axis=axis)
        return
    source = matched(model, _opened(place, tag), strict=strict, ties=_may_be_one(model))
    _check_ties(model, source)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in source.names():
        tensor, own = source.read(name), parameters.get(name)
        into = own if own is not None else buffers.get(name, tensor)
        check_value(source, name, tensor, own, into.dtype if into.is_floating_point() else tensor.dtype)
        source.release([name])
    for path, module in model.named_modules():
        if is_injected(module) and not is_untouched(module):
            raise UnsupportedError(f"{path} was changed since it was fused; build a new engine")
        if is_injected(module):
            refuse_streamed(path, module)
    with torch.no_grad():
        written = _write(model, source)
        for name, parameter in model.named_parameters():
            if name in source and name not in written and not parameter.is_meta:
                parameter.data.copy_(source.read(name))
        for path, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                name = f"{path}.{leaf}" if path else leaf
                if buffer is not None and name in source:
                    buffer.copy_(source.read(name))


def _opened(place: str | os.PathLike[str], tag: str | None) -> Slices:
    """Open a checkpoint of dense tensors; one of packed weights is refused, a new engine has to be built."""
    folder = Path(os.path.expanduser(place))
    if is_packed_folder(folder):
        raise WeightError(
            f"{folder} holds packed weights ({MANIFEST}), which only a new engine can load; pass it to "
            "init_inference as the model, or as `checkpoint` together with a model"
        )
    return open_checkpoint(place, tag=tag)


def _on_ranks(
    model: nn.Module, place: str | os.PathLike[str], *, tag: str | None, strict: bool, axis: Axis
) -> None:
    """Reload on several ranks: each writes its part once all of them have read the files."""
    wholes = wholes_of(model)

    def read() -> dict[str, Tensor]:
        slices = _opened(place, tag)
        if len(slices.ranks) > 1 and any(map(is_split, model.modules())):
            raise UnsupportedError(
                f"{slices.what} has slices of {len(slices.ranks)} ranks, which cannot be joined for layers "
                "that run their own code on several ranks; load it in one process and call save_checkpoint"
            )
        source = matched(model, slices, strict=strict, ties=_may_be_one(model))
        _check_ties(model, source)
        return {name: source.read(name) for name in wholes if name in source}

    values = agree_on_values(read, axis)
    if wholes.keys() - values.keys():  # the same on all ranks, which gather the unchanged tensors together
        values = model.state_dict() | values
    refresh(model, {name: values[name] for name in wholes}, format_named, PASSES, axis)


def _may_be_one(model: nn.Module) -> list[tuple[str, ...]]:
    """Return groups of names for which a checkpoint may have a single tensor.

    These are the names of one tensor, and pairs that transformers ties although one of them is packed here.
    """
    packed = {name for names in packed_names(model) for name in names}
    pairs = [pair for pair in tied_by_transformers(model) if packed & set(pair)]
    groups = [set(names) for names in (*tied_names(model), *pairs)]
    joined: list[set[str]] = []
    for group in groups:
        touching = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group] + [group.union(*touching)]
    return [tuple(sorted(group)) for group in joined]


def _check_ties(model: nn.Module, source: Renamed) -> None:
    """Refuse a checkpoint with two different values for one tensor.

    Raises:
        WeightError: Naming both values.
    """
    for first, *others in tied_names(model):
        for other in others:
            if first in source and other in source and source.home(first) != source.home(other):
                raise WeightError(
                    f"{source.place(first)} and {source.place(other)} differ, but are one tensor in this "
                    "engine; build a new engine from the checkpoint"
                )


def _write(model: nn.Module, source: Renamed) -> set[str]:
    """Fill fused layers and packed modules, and return the names of the tensors that went into them."""
    written: set[str] = set()
    for path, module in model.named_modules():
        if is_injected(module):
            state = injected_state(module)
            for role, weight in state.block.weights.matrices.items():
                plan = state.plans[role]
                _fill(weight, _under(path, plan.weight), source, written)
                if weight.bias is not None:
                    _copy(weight.bias, _under(path, plan.bias), source, written)
            for role, vector in state.block.weights.vectors.items():
                plan = state.plans[role]
                for tensor, pieces in ((vector.weight, plan.weight), (vector.bias, plan.bias)):
                    if tensor is not None and pieces:
                        _copy(tensor, _under(path, pieces), source, written)
        elif is_packed(module):
            for leaf, (weight, transposed) in packed_matrices(module).items():
                name = f"{path}.{leaf}"
                rows = weight.shape[-2]
                _fill(weight, (Piece(name, 0, rows, transposed=transposed),), source, written)
    return written


def _under(path: str, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(replace(piece, name=f"{path}.{piece.name}" if piece.name else "") for piece in pieces)


def _there(pieces: tuple[Piece, ...], source: Source, written: set[str]) -> bool:
    names = {piece.name for piece in pieces if piece.name}
    written |= names
    return bool(names) and all(name in source for name in names)


def _copy(target: Tensor, pieces: tuple[Piece, ...], source: Source, written: set[str]) -> None:
    if _there(pieces, source, written):
        target.copy_(gather(source, pieces).reshape(target.shape))


def _fill(weight: Weight, pieces: tuple[Piece, ...], source: Source, written: set[str]) -> None:
    if not _there(pieces, source, written):
        return
    dense = gather(source, pieces)
    if weight.dtype is None:
        rows = dense.split([plane.shape[-2] for plane in weight.planes], dim=-2)
        planes: Iterator[Tensor] = iter(rows)
    else:
        made = (FORMATS | VARIANTS)[weight.packed_as].pack(dense.to(weight.planes[0].device, weight.dtype))
        planes = iter(made)
    for plane, new in zip(weight.planes, planes, strict=True):
        plane.copy_(new)
    source.release(piece.name for piece in pieces if piece.name)
