"""Slots of split modules: where a rank stores its parts, under the names of the whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from slipstream.formats import Format
from slipstream.model.tensor_parallel.split import split_of
from slipstream.model.weights.packed import holds, packed_matrices
from slipstream.ops.linear import Weight
from slipstream.parallel.plan import Cut
from slipstream.weights.slot import Part, plain

__all__ = ["slots_of_parts", "whole_of_part"]


def whole_of_part(module: nn.Module) -> dict[str, Tensor]:
    """Return tensors without values in the whole shapes of a split module's parts, by names in the module."""
    plan, _ = split_of(module)
    wholes = {}
    for leaf, cut in plan.cuts.items():
        own = _tensor(module, leaf)
        if own is not None:
            shape = list(own.shape)
            shape[cut.dim] = max(run.stop for runs in cut.runs for run in runs)  # ranks may share heads
            wholes[leaf] = torch.empty(shape, dtype=own.dtype, device="meta")
    for leaf in plan.once:
        if module._parameters.get(leaf) is None:
            like = module._parameters["weight"]
            assert like is not None  # the module is a linear
            wholes[leaf] = torch.empty(like.shape[0], dtype=like.dtype, device="meta")
    return wholes


def slots_of_parts(
    path: str,
    module: nn.Module,
    names: Mapping[int, Sequence[str]],
    format_named: Callable[[str], Format],
) -> dict[str, Part]:
    """Return the slots of a split module's parts, by names in the module.

    Args:
        path: Path of the module.
        module: A module that holds a rank's part.
        names: The model's names of each tensor, by its `id`.
        format_named: Returns a format by its name.
    """
    plan, rank = split_of(module)
    slots: dict[str, Part] = {}
    for leaf, cut in plan.cuts.items():
        own = _tensor(module, leaf)
        if own is None:
            continue
        paths = tuple(names[id(own)])
        if holds(module, leaf):
            weight, transposed = packed_matrices(module)[leaf]
            slots[leaf] = Part(paths, weight, _packs(paths[0], cut, rank, weight, transposed, format_named))
        else:
            slots[leaf] = Part(paths, plain(own.detach()), _cuts(paths[0], cut, rank))
    for leaf in plan.once if rank else ():
        own = module._parameters.get(leaf)
        paths = (f"{path}.{leaf}",) if own is None else tuple(names[id(own)])
        dtype = next(p.dtype for p in module._parameters.values() if p is not None)
        slots[leaf] = Part(
            paths,
            Weight("plain", (), (), _nothing, None, dtype),
            _nobody(dtype),
        )
    return slots


def _tensor(module: nn.Module, leaf: str) -> Tensor | None:
    """A parameter or a saved buffer."""
    own = module._parameters.get(leaf)
    if own is not None or leaf in module._non_persistent_buffers_set:
        return own
    return module._buffers.get(leaf)


def _cuts(name: str, cut: Cut, rank: int) -> Callable[[Mapping[str, Tensor]], Weight]:
    return lambda values: plain(cut.of(values[name], rank))


def _packs(
    name: str,
    cut: Cut,
    rank: int,
    weight: Weight,
    transposed: bool,
    format_named: Callable[[str], Format],
) -> Callable[[Mapping[str, Tensor]], Weight]:
    """Packs a rank's part in its format; where inputs are cut, with scales of the whole rows if possible."""
    wanted = format_named(weight.packed_as)

    def make(values: Mapping[str, Tensor]) -> Weight:
        whole = values[name]
        inputs = whole.dim() - (2 if transposed else 1)
        if cut.dim % whole.dim() == inputs and wanted.columns is not None:
            return wanted.part(whole.mT if transposed else whole, None, cut.runs[rank][0])
        own = cut.of(whole, rank)
        return wanted.weight(own.mT if transposed else own, None)

    return make


def _nothing(planes: tuple[Tensor, ...], *_: object) -> Tensor:
    raise AssertionError("the first rank has it")


def _nobody(dtype: torch.dtype) -> Callable[[Mapping[str, Tensor]], Weight]:
    """Makes the empty part of a rank that does not hold the parameter: only the first rank does."""
    return lambda _: plain(torch.empty(0, dtype=dtype, device="cpu"))
