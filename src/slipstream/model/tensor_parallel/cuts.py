"""Candidate ways to cut a branch of a layer for several ranks; a rehearsal decides which one is right.

Shapes: H query heads, K kv heads, D head dim, I units of a feed-forward.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from slipstream.model.tensor_parallel.flow import STREAM, Branch, Flow, is_matrix, matrix_dims
from slipstream.model.tensor_parallel.sizes import UNITS, Sizes
from slipstream.model.tensor_parallel.split import LayerSplit, ModuleSplit
from slipstream.parallel.plan import Cut, Heads, Runs, halves

__all__ = ["attention_splits", "entries", "gathered", "unit_splits"]

_DIM = re.compile(
    r"head_dim|(?<!all_)head_size|d_kv|key_value_proj_dim|dim_head|per_attention_head|dim_per_head"
)
_COUNTS = re.compile(
    r"(?<![a-z])(n|num|nb)_?(attn_|attention_|kv_|key_value_|q_|self_attn_)*(heads?|groups|kv)|"
    r"heads$|^n_?head$|key_value_groups|n_rep|kv_heads"
)
_KV = re.compile(r"kv|key_value")
_GROUPS = re.compile(r"groups|n_rep")
_WIDTHS = re.compile(r"dim|size|width|hidden|inner|d_model|features")

Rewriting = tuple[bool, bool, bool]
"""Whether widths, entries of configs, and tensors other than the matrices are changed with the heads."""

_REWRITINGS: tuple[Rewriting, ...] = (
    (True, False, True),
    (True, True, True),
    (False, False, True),
    (False, True, True),
    (True, False, False),
    (False, False, False),
)


def gathered(module: nn.Module, sizes: Sizes) -> ModuleSplit:
    """Cut a matrix by its outputs, which the ranks then join; this is right anywhere in a layer."""
    rows, _ = matrix_dims(module)
    weight = module.get_parameter("weight")
    runs = sizes.even(weight.shape[rows])
    return _columns(module, runs, "gather")


def _columns(module: nn.Module, runs: tuple[Runs, ...], finish: Literal["keep", "gather"]) -> ModuleSplit:
    """Cut a matrix by its outputs."""
    rows, _ = matrix_dims(module)
    cuts = {"weight": Cut(rows, runs)}
    if module._parameters.get("bias") is not None:
        cuts["bias"] = Cut(0, runs)
    widths = Cut(-1, runs).widths
    name = "nf" if "nf" in vars(module) else "out_features" if "out_features" in vars(module) else ""
    numbers = tuple({name: width} for width in widths) if name else ()
    return ModuleSplit(cuts, finish=finish, places=Cut(-1, runs), numbers=numbers)


def _row(module: nn.Module, runs: tuple[Runs, ...]) -> ModuleSplit:
    """Cut a matrix by its inputs; its output is summed over ranks, and only one rank adds the bias."""
    _, inputs = matrix_dims(module)
    once = frozenset({"bias"}) if module._parameters.get("bias") is not None else frozenset[str]()
    widths = Cut(-1, runs).widths
    numbers = tuple({"in_features": width} for width in widths) if "in_features" in vars(module) else ()
    return ModuleSplit({"weight": Cut(inputs, runs)}, once, "sum", numbers=numbers)


def _widths(layer: nn.Module, branch: Branch) -> tuple[int, dict[str, int]]:
    """Input width of the matrix that ends a branch, and output widths of the other matrices."""
    row = layer.get_submodule(branch.row)
    width = row.get_parameter("weight").shape[matrix_dims(row)[1]]
    outs = {}
    for path in branch.columns:
        module = layer.get_submodule(path)
        outs[path] = module.get_parameter("weight").shape[matrix_dims(module)[0]]
    return width, outs


def unit_splits(layer: nn.Module, branch: Branch, flow: Flow, sizes: Sizes) -> Iterator[LayerSplit]:
    """Yield ways to cut a feed-forward, gated or not, whose units are independent of each other."""
    width, outs = _widths(layer, branch)
    if width < sizes.ranks or any(out not in (width, 2 * width) for out in outs.values()):
        return
    runs = sizes.even(width)
    layouts: tuple[Literal["stacked", "paired"], ...] = ("stacked",)
    if any(out != width for out in outs.values()):
        layouts = ("stacked", "paired")
    for layout, renames in itertools.product(layouts, (False, True)):
        rows = {p: runs if out == width else halves(runs, width, layout) for p, out in outs.items()}
        split = _matrices(layer, branch, rows, runs)
        split |= _norms(layer, branch, flow, {**rows, branch.row: runs})
        if renames and branch.parent:
            wanted = {width: Cut(-1, runs).widths}
            _renumber(layer.get_submodule(branch.parent), branch.parent, split, wanted)
        yield split


def _matrices(
    layer: nn.Module, branch: Branch, rows: Mapping[str, tuple[Runs, ...]], runs: tuple[Runs, ...]
) -> dict[str, ModuleSplit]:
    split = {path: _columns(layer.get_submodule(path), own, "keep") for path, own in rows.items()}
    split[branch.row] = _row(layer.get_submodule(branch.row), runs)
    return split


def _norms(
    layer: nn.Module, branch: Branch, flow: Flow, places: Mapping[str, tuple[Runs, ...]]
) -> dict[str, ModuleSplit]:
    """Norms within the branch that are as wide as a cut tensor, so that their rows are split over ranks."""
    norms = {}
    for path, tags in flow.reads.items():
        module = layer.get_submodule(path)
        weight = module._parameters.get("weight")
        inside = bool(tags) and STREAM not in tags and tags <= {*branch.columns, "*attention"}
        if weight is None or weight.dim() != 1 or not inside:
            continue
        for owner in (*branch.columns, branch.row):
            cut = Cut(-1, places[owner])
            reads = owner == branch.row or owner in tags
            if reads and len(weight) == max(run.stop for runs in cut.runs for run in runs):
                norms[path] = ModuleSplit(finish="across", places=cut)
                break
    return norms


def _renumber(
    parent: nn.Module, path: str, split: dict[str, ModuleSplit], wanted: Mapping[int, Sequence[int]]
) -> None:
    """Change attributes of modules that hold a width to the width on each rank."""
    for name, module in parent.named_modules(prefix=path):
        if name in split:
            continue
        changes = {
            key: wanted[value]
            for key, value in vars(module).items()
            if type(value) is int and value in wanted and UNITS.search(key)
        }
        if changes:
            ranks = range(len(next(iter(changes.values()))))
            numbers = tuple({key: values[rank] for key, values in changes.items()} for rank in ranks)
            split[name] = ModuleSplit(numbers=numbers)


def attention_splits(layer: nn.Module, branch: Branch, flow: Flow, sizes: Sizes) -> Iterator[LayerSplit]:
    """Yield ways to cut attention: query heads with their kv heads, in each known order of fused matrices."""
    width, outs = _widths(layer, branch)
    parent = layer.get_submodule(branch.parent)
    for heads in _head_counts(parent, width, layer):
        dim = width // heads
        if heads < sizes.ranks:
            continue
        for kv_heads in _kv_counts(heads, dim, list(outs.values())):
            dealt = Heads(heads, kv_heads, sizes.ranks, sizes.turn)
            options = [list(_row_options(out, dim, dealt)) for out in outs.values()]
            for chosen in itertools.product(*options):
                rows = dict(zip(outs, chosen, strict=True))
                for rewriting in _REWRITINGS:
                    yield _attention(layer, branch, flow, (dealt, dim, rows), rewriting)


def _head_counts(parent: nn.Module, width: int, layer: nn.Module) -> list[int]:
    """Candidate numbers of heads, from attributes of the modules and their configs."""
    dims, counts = [], []
    owners = [*parent.modules(), layer]
    for module in owners:
        named = {**entries(getattr(module, "config", None)), **vars(module)}
        for key, value in named.items():
            if type(value) is not int or value < 1 or width % value:
                continue
            if _DIM.search(key):
                dims.append(width // value)
            elif _COUNTS.search(key) and not _KV.search(key) and not _GROUPS.search(key):
                counts.append(value)
    return list(dict.fromkeys((*dims, *counts)))[:4]


def entries(config: Any) -> dict[str, Any]:
    """Return a config's entries by name; none for an object without attributes."""
    return {} if config is None or not hasattr(config, "__dict__") else vars(config)


def _kv_counts(heads: int, dim: int, outs: Sequence[int]) -> list[int]:
    """Candidate numbers of kv heads that the output widths of the matrices allow."""
    found = []
    for out in outs:
        units = 0 if out % dim else out // dim
        if units > heads:
            found += [(units - heads) // 2, units // 2] if len(outs) > 1 else [(units - heads) // 2]
        else:
            found.append(units)
    return [k for k in sorted(set(found)) if k and heads % k == 0] or [heads]


def _row_options(out: int, dim: int, dealt: Heads) -> Iterator[tuple[Runs, ...]]:
    heads, keys = dealt.heads, dealt.kv_heads
    if out == (heads + 2 * keys) * dim and keys:
        yield dealt.fused(dim, "stacked")
        yield dealt.fused(dim, "grouped")
    elif out == keys * dim and keys != heads:
        yield dealt.keys(dim)
    elif out % heads == 0:
        yield dealt.queries(out // heads)
        if out == 2 * heads * dim:
            yield dealt.pairs(dim, "stacked")
    if out == 2 * keys * dim and keys != heads:
        yield dealt.pairs(dim, "stacked")
        yield dealt.pairs(dim, "grouped")


def _attention(
    layer: nn.Module,
    branch: Branch,
    flow: Flow,
    how: tuple[Heads, int, Mapping[str, tuple[Runs, ...]]],
    rewriting: Rewriting,
) -> LayerSplit:
    dealt, dim, rows = how
    widths, in_config, tensors = rewriting
    runs = dealt.queries(dim)
    split = _matrices(layer, branch, rows, runs)
    split |= _norms(layer, branch, flow, {**rows, branch.row: runs})
    parent = layer.get_submodule(branch.parent)
    for path, module in parent.named_modules(prefix=branch.parent):
        if path in split:
            continue
        numbers = [_numbers(vars(module), dealt, dim, rank, widths) for rank in range(dealt.size)]
        config = [
            _numbers(entries(vars(module).get("config")), dealt, dim, rank, False) if in_config else {}
            for rank in range(dealt.size)
        ]
        cuts = _tensor_cuts(module, dealt) if tensors else {}
        at_top = path == branch.parent
        # Hooks for attention maps may be on any module around the projections.
        answers = at_top or any(column.startswith(f"{path}.") for column in branch.columns)
        if cuts or any(numbers) or any(config) or answers:
            split[path] = ModuleSplit(
                cuts,
                numbers=tuple(numbers),
                config=tuple(config) if any(config) else (),
                heads=Cut(0, dealt.queries(1)) if answers else None,
                arguments=_by_heads(flow.arguments.get(path, []), dealt.heads) if at_top else {},
            )
    return split


def _numbers(named: Mapping[str, Any], dealt: Heads, dim: int, rank: int, widths: bool) -> dict[str, int]:
    """Attributes that depend on the number of heads, with their values on one rank."""
    queries, keys = dealt.own(rank)
    changed: dict[str, int] = {}
    for key, value in named.items():
        if type(value) is not int or _DIM.search(key):
            continue
        if _COUNTS.search(key):
            if _GROUPS.search(key) and value == dealt.heads // dealt.kv_heads:
                changed[key] = len(queries) // len(keys)
            elif _KV.search(key) and value == dealt.kv_heads:
                changed[key] = len(keys)
            elif not _KV.search(key) and value == dealt.heads:
                changed[key] = len(queries)
        elif widths and _WIDTHS.search(key) and value == dealt.heads * dim:
            changed[key] = len(queries) * dim
        elif widths and _WIDTHS.search(key) and value == dealt.kv_heads * dim:
            changed[key] = len(keys) * dim
    return changed


def _tensor_cuts(module: nn.Module, dealt: Heads) -> dict[str, Cut]:
    """Cuts of tensors other than the matrices that have a dim with one entry per head."""
    cuts: dict[str, Cut] = {}
    if is_matrix(module):
        return cuts
    tensors = {**module._parameters, **module._buffers}
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        dims = [place for place, length in enumerate(tensor.shape) if length == dealt.heads]
        if dims and not (name == "weight" and tensor.dim() == 1):
            place = dims[-1] if isinstance(module, nn.Embedding) else dims[0]
            cuts[name] = Cut(place, dealt.queries(1))
    return cuts


def _by_heads(calls: Sequence[Mapping[int | str, tuple[int, ...]]], heads: int) -> dict[int | str, int]:
    """Arguments that have one entry per head in every call, with the dim of the heads."""
    dims: dict[int | str, int] = {}
    for key in dict.fromkeys(key for call in calls for key in call):
        shapes = [call[key] for call in calls if key in call]
        if all(len(shape) == 4 and shape[1] == heads for shape in shapes):
            dims[key] = 1
            continue
        of_heads = all(len(shape) == 3 and shape[0] % heads == 0 for shape in shapes)
        if of_heads and isinstance(key, str) and re.search("alibi|bias", key):
            dims[key] = 0
    return dims
