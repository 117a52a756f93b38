"""Candidate ways to cut experts that are parameters of one module for several ranks.

Shapes: I units of an expert, E experts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from slipstream.model.tensor_parallel.cuts import entries
from slipstream.model.tensor_parallel.flow import is_matrix
from slipstream.model.tensor_parallel.sizes import UNITS, Sizes
from slipstream.model.tensor_parallel.split import LayerSplit, ModuleSplit
from slipstream.parallel.plan import Cut, Runs, halves

__all__ = ["expert_splits", "whole_experts"]


def whole_experts(module: nn.Module) -> bool:
    """Whether a module holds matrices of experts as its own parameters, or as those of a child (`_flat`)."""
    threes = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    return (len(threes) > 1 and not is_matrix(module)) or _flat(module) is not None


def _flat(module: nn.Module) -> tuple[str, int, int] | None:
    """Name, E and I of a child with matrices `(E * I, C)`, as in DBRX; E and I are attributes of `module`."""
    counts = [v for n, v in vars(module).items() if type(v) is int and re.search("num.*expert", n)]
    for name, part in module.named_children():
        shapes = {tuple(p.shape) for p in part._parameters.values() if p is not None}
        if counts and len(part._parameters) > 1 and len(shapes) == 1 and not is_matrix(part):
            rows, *inputs = shapes.pop()
            units = rows // counts[0]
            if len(inputs) == 1 and units * counts[0] == rows and units in vars(module).values():
                return name, counts[0], units
    return None


def expert_splits(path: str, module: nn.Module, sizes: Sizes) -> Iterator[LayerSplit]:
    """Yield ways to cut every expert by its units; the output is summed over ranks."""
    flat = _flat(module)
    if flat is not None:
        name, experts, units = flat
        part = module.get_submodule(name)
        own = sizes.even(units) if units >= sizes.ranks else ()
        runs = tuple(
            tuple(range(e * units + r.start, e * units + r.stop) for e in range(experts) for r in each)
            for each in own
        )
        wanted = {units: Cut(-1, own).widths}
        if runs:
            cuts = {matrix: Cut(0, runs) for matrix in part._parameters}
            yield {
                path: ModuleSplit(finish="sum", numbers=_follow(module, wanted)),
                f"{path}.{name}": ModuleSplit(cuts, numbers=_follow(part, wanted)),
            }
    matrices = {n: p for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    downs = [name for name in matrices if re.search(r"down|out|w2|fc2|wo", name)]
    if len(downs) != 1:
        return
    down = matrices[downs[0]]
    flag = getattr(module, "is_transposed", None)
    for transposed in (False, True) if flag is None else (bool(flag),):
        units = down.shape[1 if transposed else 2]
        if units < sizes.ranks:
            continue
        unit = max(sizes.group, sizes.align)
        aligned = replace(sizes, group=unit if units >= unit * sizes.ranks else sizes.group)
        runs, config = aligned.even(units), _plainly(module, sizes) if units < unit * sizes.ranks else ()
        for layout, renames in itertools.product(("stacked", "paired"), (False, True)):
            split = _experts(module, matrices, downs[0], (runs, units, transposed, layout))
            if split is not None:
                wanted = {units: Cut(-1, runs).widths, 2 * units: [2 * w for w in Cut(-1, runs).widths]}
                numbers = _follow(module, wanted) if renames else ()
                yield {path: replace(split, numbers=numbers, config=config)}


def _plainly(module: nn.Module, sizes: Sizes) -> tuple[Mapping[str, str], ...]:
    """Config that makes transformers run experts one by one, since grouped products need wider rows."""
    name = "_experts_implementation_internal"
    return ({name: "eager"},) * sizes.ranks if name in entries(vars(module).get("config")) else ()


def _follow(module: nn.Module, wanted: Mapping[int, Sequence[int]]) -> tuple[Mapping[str, int], ...]:
    changes = {
        key: wanted[value]
        for key, value in vars(module).items()
        if type(value) is int and value in wanted and UNITS.search(key) and not key.startswith("hidden")
    }
    ranks = range(len(next(iter(wanted.values()))))
    return tuple({key: values[rank] for key, values in changes.items()} for rank in ranks)


def _experts(
    module: nn.Module, matrices: Mapping[str, nn.Parameter], down: str, how: tuple[Any, ...]
) -> ModuleSplit | None:
    runs, units, transposed, layout = how
    rows, inputs = (2, 1) if transposed else (1, 2)
    cuts = {down: Cut(inputs, runs)}
    for name, matrix in matrices.items():
        if name == down:
            continue
        own = _units_of(matrix.shape[rows], units, runs, layout)
        if own is None:
            return None
        cuts[name] = Cut(rows, own)
    once = set()
    for name, vector in module._parameters.items():
        if vector is None or vector.dim() != 2:
            continue
        own = _units_of(vector.shape[1], units, runs, layout)
        if name.startswith(down) or re.search("down|out", name):
            once.add(name)
        elif own is not None:
            cuts[name] = Cut(1, own)
    return ModuleSplit(cuts, frozenset(once), "sum")


def _units_of(length: int, units: int, runs: tuple[Runs, ...], layout: Any) -> tuple[Runs, ...] | None:
    if length == units:
        return runs
    return halves(runs, units, layout) if length == 2 * units else None
