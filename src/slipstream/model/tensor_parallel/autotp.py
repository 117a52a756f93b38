"""Tensor parallelism for layers that run their own code: chooses how to cut them, proved by a rehearsal.

A branch (linears whose outputs only the branch's last linear reads) is cut so that ranks communicate once,
after the last linear. The ends of branches are the linears that the user's policy names, those that
transformers' own plan calls "rowwise", and those that a run of the layer reveals. Every way to cut a branch
is rehearsed beside the whole layer, and the first one with the same output is taken. Any other linear is cut
by its rows, and the ranks join their outputs: this requires no knowledge of the layer, and a rank still holds
only its part.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from slipstream.errors import InjectionError
from slipstream.model.convert import convert
from slipstream.model.layers import Found
from slipstream.model.report import SplitReport
from slipstream.model.selfcheck.check import MODEL_ERRORS, RecordedCall
from slipstream.model.tensor_parallel.cuts import attention_splits, gathered, unit_splits
from slipstream.model.tensor_parallel.expert_cuts import expert_splits, whole_experts
from slipstream.model.tensor_parallel.flow import (
    Branch,
    Flow,
    branches_of,
    is_matrix,
    matrix_dims,
    watch_flow,
)
from slipstream.model.tensor_parallel.rehearsal import Stage
from slipstream.model.tensor_parallel.sizes import Sizes
from slipstream.model.tensor_parallel.split import LayerSplit, ModuleSplit

__all__ = ["LayerPlan", "is_shared_out", "plan_layer", "staged"]

log = logging.getLogger(__name__)

_SMALL = 1024
"""Matrices with fewer elements than this stay whole: they are not worth the communication."""

_SHARED = ", keys on several ranks"

_OF_LINEARS = frozenset({"weight", "bias", "out_features"})
"""Attributes of a linear that are others on a rank that has some of its rows."""

_ROUTER = re.compile(r"(^|[._])(gate|router|gating)$")
_SIBLING = re.compile(r"(?<![A-Za-z])\d+(?=\.|$)")


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is cut.

    Attributes:
        split: How its modules are cut.
        rows: Rows for the report.
        max_error: Largest error in the rehearsal; None where the layer could not be run.
    """

    split: LayerSplit
    rows: tuple[SplitReport, ...]
    max_error: float | None

    def of_heads(self) -> LayerSplit:
        """Return the part of the split that follows heads, which may be dealt unevenly."""
        chosen = {row.name for row in self.rows if "by heads" in row.how}
        return {path: own for path, own in self.split.items() if path in chosen}


@dataclass
class _Draft:
    """A plan under construction: how modules are cut, and for each linear how and by what source."""

    split: dict[str, ModuleSplit] = field(default_factory=dict)
    how: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, split: LayerSplit, how: Mapping[str, tuple[str, str]]) -> None:
        self.split |= split
        self.how |= how

    def of_heads(self) -> LayerSplit:
        """Return the part of the split that follows heads, which may be dealt unevenly."""
        return {path: own for path, own in self.split.items() if "by heads" in self.how.get(path, ("",))[0]}


def plan_layer(
    first: Found,
    calls: Sequence[RecordedCall],
    sizes: Sizes,
    known: tuple[Sequence[str], Sequence[str], str],
    *,
    strict: bool,
) -> LayerPlan:
    """Make the plan for one layer.

    `known` holds the user's ends of branches, transformers' patterns, and why `calls` is empty.
    """
    named, patterns, why = known
    stage, reason = staged(first.layer, calls, why)
    if stage is None:
        draft = _Draft()
        _gather_rest(first.layer, None, draft, sizes)
        return LayerPlan(draft.split, _rows(first.layer, draft, reason), None)
    flow = watch_flow(stage.layer, stage.given_calls())
    draft = _Draft()
    paths = [path for path in flow.reads if any(f".{path}".endswith(f".{n.lstrip('.')}") for n in named)]
    reasons = _branches(first, stage, flow, draft, sizes, (paths, patterns))
    _refuse_unproved(first, paths, draft, reasons, strict=strict)
    sizes = sizes.beside(stage.layer, draft.of_heads())
    _experts(stage, draft, sizes, reasons)
    proved, error = _with_rest(stage, flow, draft, sizes, reasons)
    return LayerPlan(proved.split, _rows(first.layer, proved, "", reasons), error)


def staged(layer: nn.Module, calls: Sequence[RecordedCall], why: str = "") -> tuple[Stage | None, str]:
    """Prepare a layer and its calls for rehearsal; return None and the reason where that is impossible.

    Args:
        layer: Only read.
        calls: Recorded calls of the layer. The layer may be unable to repeat them outside of its model.
        why: The reason if there are no calls.
    """
    if not calls:
        return None, f"the model cannot be run on random input to check other splits: {why}"
    try:
        return Stage(_in_float32(layer), calls), ""
    except MODEL_ERRORS as failure:
        first = str(failure).partition("\n")[0]
        return (
            None,
            f"it cannot repeat recorded calls outside of its model: {type(failure).__name__}: {first}",
        )


def _in_float32(layer: nn.Module) -> nn.Module:
    """The layer or a copy in float32, in which reordered sums can be told from errors."""
    if all(t.dtype == torch.float32 for t in layer.parameters() if t.is_floating_point()):
        return layer
    wide = copy.deepcopy(layer)
    convert(wide, torch.float32)
    return wide


def _branches(
    found: Found,
    stage: Stage,
    flow: Flow,
    draft: _Draft,
    sizes: Sizes,
    known: tuple[Sequence[str], Sequence[str]],
) -> dict[str, str]:
    """Cut branches so that ranks communicate once in each; return why others stay, by their last linear."""
    named, patterns = known
    reasons: dict[str, str] = {}
    for branch in sorted(branches_of(stage.layer, flow, named), key=lambda found: not found.attends):
        paths = (branch.row, *branch.columns)
        if any(path in draft.split for path in paths):
            continue
        if branch.attends and found.spec is not None and found.spec.sharing != "own":
            reasons[branch.row] = "its keys and values are shared with other layers"
            continue
        unreached = _unreached(stage.layer, branch, flow)
        if unreached is not None:
            reasons[branch.row] = f"no run reached {unreached}, which may read or write the heads as well"
            continue
        full = f"{found.name}.{branch.row}"
        by_plan = any(_matches(full, pattern) for pattern in patterns)
        source = "injection_policy" if named else "transformers' plan" if by_plan else "structure"
        ways = [attention_splits, unit_splits] if branch.attends else [unit_splits, attention_splits]
        left = sizes.beside(stage.layer, draft.of_heads())
        options = itertools.chain.from_iterable(way(stage.layer, branch, flow, left) for way in ways)
        chosen, reason = _first_right(stage, options, draft, sizes)
        if chosen is None:
            reasons[branch.row] = reason
            continue
        kind = "by heads" if chosen.get(branch.parent, ModuleSplit()).heads is not None else "by units"
        for twin, split in (("", chosen), *_siblings(stage.layer, flow, branch, chosen)):
            own = {f"{twin}{path.removeprefix(branch.parent)}" if twin else path for path in branch.columns}
            row = f"{twin}{branch.row.removeprefix(branch.parent)}" if twin else branch.row
            how = {
                path: (f"rows {kind}{_SHARED * split[path].cuts['weight'].overlaps}", source) for path in own
            }
            draft.add(split, how | {row: (f"inputs {kind}, added up", source)})
    return reasons


def _unreached(layer: nn.Module, branch: Branch, flow: Flow) -> str | None:
    """A linear inside an attention module that no recorded call reached, though other inputs may; or None."""
    if not (branch.attends and branch.parent):
        return None
    inside = layer.get_submodule(branch.parent).named_modules(prefix=branch.parent)
    return next((path for path, module in inside if is_matrix(module) and path not in flow.reads), None)


def _matches(path: str, pattern: str) -> bool:
    """Whether a full path ends in a pattern of transformers' plan, in which `#` is any number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", f".{path}").endswith(f".{pattern}")


def _first_right(
    stage: Stage, options: Iterator[LayerSplit], draft: _Draft, sizes: Sizes
) -> tuple[LayerSplit | None, str]:
    """The first way to cut a branch that keeps the layer's output; or None, and why the first one failed."""
    reason = ""
    for option in options:
        if any(path in draft.split for path in option):
            reason = reason or "a part of it is already split"
            continue
        try:
            stage.error(option, sizes.ranks)
        except InjectionError as failure:
            reason = reason or str(failure)
            continue
        return option, ""
    return None, reason or f"its heads or units cannot be divided among {sizes.ranks} ranks"


def _siblings(
    layer: nn.Module, flow: Flow, branch: Branch, split: LayerSplit
) -> Iterator[tuple[str, dict[str, ModuleSplit]]]:
    """Yield the same split for sibling modules that were not called, such as experts without tokens."""
    if not re.search(r"\.\d+$", branch.parent):
        return
    stem = branch.parent.rpartition(".")[0]
    model_of = [(path.removeprefix(branch.parent), own) for path, own in split.items()]
    for name, module in layer.get_submodule(stem).named_children():
        path = f"{stem}.{name}"
        if path == branch.parent or any(read.startswith(f"{path}.") for read in flow.reads):
            continue
        shapes = [tuple(p.shape) for p in module.parameters()]
        if shapes == [tuple(p.shape) for p in layer.get_submodule(branch.parent).parameters()]:
            yield path, {f"{path}{rest}": own for rest, own in model_of}


def _refuse_unproved(
    found: Found,
    paths: Sequence[str],
    draft: _Draft,
    reasons: Mapping[str, str],
    *,
    strict: bool,
) -> None:
    """Refuse a policy that names linears that end no branch; only warn unless `strict`.

    Raises:
        InjectionError: A named linear was called, but was not even tried as the end of a branch.
    """
    wrong = [path for path in paths if path not in draft.split and path not in reasons]
    if not wrong:
        return
    message = (
        f"injection_policy names {wrong[0]!r} of {found.name} ({type(found.layer).__name__}) as a linear "
        "whose outputs are summed over ranks, but its input does not come from other linears alone; name the "
        "linears that end a residual branch"
    )
    if strict:
        raise InjectionError(message)
    log.warning("%s", message)


def _experts(stage: Stage, draft: _Draft, sizes: Sizes, reasons: dict[str, str]) -> None:
    """Cut the experts of modules that hold them as parameters."""
    for path, module in stage.layer.named_modules():
        if whole_experts(module) and path not in draft.split:
            chosen, reason = _first_right(stage, expert_splits(path, module, sizes), draft, sizes)
            if chosen is None:
                reasons[path] = reason
            else:
                draft.add(chosen, {path: ("each expert by units, added up", "structure")})


def _with_rest(
    stage: Stage, flow: Flow, draft: _Draft, sizes: Sizes, reasons: dict[str, str]
) -> tuple[_Draft, float]:
    """Add the other linears, as far as the layer's output stays right; return the plan and its error."""
    full = copy.copy(draft)
    full.split, full.how = dict(draft.split), dict(draft.how)
    _gather_rest(stage.layer, flow, full, sizes)
    rest_only = _Draft()
    _gather_rest(stage.layer, flow, rest_only, sizes)
    for attempt in (full, rest_only, draft):
        try:
            return attempt, stage.error(attempt.split, sizes.ranks)
        except InjectionError as failure:
            reasons.setdefault("", str(failure))
    return _Draft(), 0.0


def _gather_rest(layer: nn.Module, flow: Flow | None, draft: _Draft, sizes: Sizes) -> None:
    """Cut by rows the linears that are not cut yet; with a flow, only those that were called in it.

    Without a flow nothing proves the cut, so linears stay whole whose tensors other code may read.
    """
    for path, module in layer.named_modules():
        if path in draft.split or (flow is None and _may_be_read(layer, path)):
            continue
        if is_shared_out(path, module, flow, sizes):
            draft.add({path: gathered(module, sizes)}, {path: ("rows, joined", "any linear")})


def _may_be_read(layer: nn.Module, path: str) -> bool:
    """Whether a module around a linear has code that may read its weight, bias or sizes."""
    parts = path.split(".")
    around = {type(layer.get_submodule(".".join(parts[:count]))) for count in range(len(parts))}
    return any(not _OF_LINEARS.isdisjoint(_names_in_forward(kind)) for kind in around)  # type: ignore[arg-type]


@functools.cache
def _names_in_forward(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names that a module's forward uses, and those in methods of its classes that it calls."""
    own = [one for one in kind.__mro__ if one not in nn.Module.__mro__]
    names, called = set[str](), ["forward"]
    while called:
        name = called.pop()
        methods = [inspect.unwrap(vars(one)[name]) for one in own if callable(vars(one).get(name))]
        new = {used for method in methods if hasattr(method, "__code__") for used in method.__code__.co_names}
        called += new - names
        names |= new
    return frozenset(names)


def is_shared_out(path: str, module: nn.Module, flow: Flow | None, sizes: Sizes) -> bool:
    """Whether a module is a linear that is large enough to be cut by rows and, with a flow, was called.

    An expert that received no token counts as called if a sibling was called.
    """
    if not path or not is_matrix(module) or _ROUTER.search(path):
        return False
    weight = module.get_parameter("weight")
    large = weight.numel() >= _SMALL and weight.shape[matrix_dims(module)[0]] >= sizes.ranks
    return large and (flow is None or path in flow.reads or _alike(path) in map(_alike, flow.reads))


def _alike(path: str) -> str:
    """A path with sibling numbers replaced, so that it is equal for siblings."""
    return _SIBLING.sub("#", path)


def _rows(
    layer: nn.Module, draft: _Draft, why: str = "", reasons: Mapping[str, str] | None = None
) -> tuple[SplitReport, ...]:
    """A report row for each matrix."""
    rows = []
    reasons = reasons or {}
    for path, module in layer.named_modules():
        if not (is_matrix(module) or whole_experts(module)):
            continue
        how, source = draft.how.get(path, ("whole on every rank", ""))
        reason = "" if "added up" in how or how.startswith("rows by") else reasons.get(path, "")
        reason = reason or ("" if source in ("structure",) else why)
        rows.append(SplitReport(path, how, source, reason or reasons.get("", "")))
    return tuple(rows)
