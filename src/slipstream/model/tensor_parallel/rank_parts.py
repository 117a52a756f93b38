"""Where a rank keeps its parts of what runs its own code, under the names of the whole tensors."""

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
    """What a split module has a part of, by its names there: tensors of whole shapes without values."""
    plan, _ = split_of(module)
    found = {}
    for leaf, cut in plan.cuts.items():
        own = _tensor(module, leaf)
        if own is not None:
            shape = list(own.shape)
            shape[cut.dim] = max(run.stop for runs in cut.runs for run in runs)  # several may have a head
            found[leaf] = torch.empty(shape, dtype=own.dtype, device="meta")
    for leaf in plan.once:
        if module._parameters.get(leaf) is None:
            like = module._parameters["weight"]
            assert like is not None  # the module is a linear
            found[leaf] = torch.empty(like.shape[0], dtype=like.dtype, device="meta")
    return found


def slots_of_parts(
    path: str,
    module: nn.Module,
    names: Mapping[int, Sequence[str]],
    format_named: Callable[[str], Format],
) -> dict[str, Part]:
    """What a split module is written to, by its names there.

    Args:
        path: Of the module.
        module: Holds a rank's part.
        names: The model's names of a tensor, by its identity.
        format_named: Gives a format by its name.
    """
    plan, rank = split_of(module)
    found: dict[str, Part] = {}
    for leaf, cut in plan.cuts.items():
        own = _tensor(module, leaf)
        if own is None:
            continue
        paths = tuple(names[id(own)])
        if holds(module, leaf):
            weight, transposed = packed_matrices(module)[leaf]
            found[leaf] = Part(paths, weight, _packs(paths[0], cut, rank, weight, transposed, format_named))
        else:
            found[leaf] = Part(paths, plain(own.detach()), _cuts(paths[0], cut, rank))
    for leaf in plan.once if rank else ():
        own = module._parameters.get(leaf)
        paths = (f"{path}.{leaf}",) if own is None else tuple(names[id(own)])
        dtype = next(p.dtype for p in module._parameters.values() if p is not None)
        found[leaf] = Part(
            paths,
            Weight("plain", (), (), _nothing, None, dtype),
            _nobody(dtype),
        )
    return found


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
    """Packs a rank's part as it was: where inputs are cut, with multipliers of whole rows if it has them."""
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
    """What a rank takes of a parameter that only the first has."""
    return lambda _: plain(torch.empty(0, dtype=dtype, device="cpu"))
