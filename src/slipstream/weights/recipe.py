"""Recipes: which rows of which source tensors make up a role's canonical tensor, and back again.

A recipe does not touch data. It lists `Piece`s (runs of rows of named tensors) in canonical order; cutting
the list to a rank's rows before anything is read gives the same bits as cutting the finished tensor. The same
list read backwards restores the source tensors.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from slipstream.errors import WeightError
from slipstream.parallel.shard import WHOLE, Slice
from slipstream.spec import BlockSpec
from slipstream.weights.source import Source

__all__ = [
    "Conv1D",
    "First",
    "Interleaved",
    "Piece",
    "Plan",
    "Recipe",
    "Stack",
    "Take",
    "Unit",
    "cut",
    "gather",
    "narrowed",
    "scatter",
]


@dataclass(frozen=True)
class Piece:
    """A run of rows of one source tensor.

    Rows are dim -2 of a matrix, dim -1 of a transposed matrix, and dim -1 of a vector or bias.

    Attributes:
        name: The source tensor; "" for rows of zeros, which fill in for a missing bias where other tensors of
            a stack have one.
        start: First row.
        count: Number of rows.
        step: Distance between rows.
        transposed: The source matrix is stored `(in, out)`.
        bias: The source is a bias: its rows are its last dim, even where each expert has a bias of its own.
        experts: Number of experts whose matrices the source stacks along dim 0; rows count within one expert.
            0 where the source is not such a stack.
    """

    name: str
    start: int
    count: int
    step: int = 1
    transposed: bool = False
    bias: bool = False
    experts: int = 0

    def lead(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The source's shape, with the experts split off as a leading dim where they are stacked in dim 0."""
        return (self.experts, shape[0] // self.experts, *shape[1:]) if self.experts else tuple(shape)

    def back(self, rows: Tensor) -> Tensor:
        """Bring all rows of the source from canonical orientation back to the source's own layout."""
        rows = rows.mT if self.transposed and rows.dim() > 1 else rows
        return rows.flatten(0, 1) if self.experts else rows

    def lies_flat(self, rows: Tensor) -> bool:
        """Whether `back` returns a view of these rows of all experts, not a copy."""
        return (rows.mT if self.transposed else rows).is_contiguous()

    def of(self, tensor: Tensor) -> Tensor:
        """The piece's rows of its source tensor, as a view in canonical orientation."""
        if self.experts:
            tensor = tensor.unflatten(0, (self.experts, -1))
        if self.transposed and tensor.dim() > 1:
            tensor = tensor.mT
        rows = slice(self.start, self.start + (self.count - 1) * self.step + 1, self.step)
        return tensor[..., rows, :] if tensor.dim() > 1 and not self.bias else tensor[..., rows]


@dataclass(frozen=True)
class Plan:
    """A role's pieces, resolved against a source.

    Attributes:
        weight: Pieces of the matrix (or vector), in canonical order; empty for a weightless norm.
        bias: Pieces of the bias; empty where there is none.
        slice: The part of the role that the plan covers. The pieces are already cut to its rows; `gather`
            applies its columns and experts.
        whole: Pieces of the whole matrix, where the plan was cut from it; else empty.
    """

    weight: tuple[Piece, ...]
    bias: tuple[Piece, ...]
    slice: Slice = WHOLE
    whole: tuple[Piece, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether each piece of the matrix holds all rows of its source tensor, in order."""
        names = {piece.name for piece in self.weight}
        runs = len(names) == len(self.weight) and all(piece.step == 1 for piece in self.weight)
        return runs and self.slice.is_whole

    @property
    def names(self) -> frozenset[str]:
        """Source tensors that the plan consumes."""
        return frozenset(piece.name for piece in (*self.weight, *self.bias) if piece.name)

    @property
    def rows(self) -> int:
        """Canonical rows of the matrix or vector."""
        return sum(piece.count for piece in self.weight)

    def cut(self, part: Slice) -> Plan:
        """Return the plan of a rank's part of the role; tensors outside of that part are never read."""
        if part.is_whole:
            return self if part.bias else replace(self, bias=())
        weight, bias = self.weight, self.bias if part.bias else ()
        if part.rows is not None:
            weight, bias = cut(weight, part.rows), cut(bias, part.rows)
        return Plan(weight, bias, part, self.weight)


class Recipe(ABC):
    """How a role's tensor is assembled from the model's own tensors."""

    @abstractmethod
    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """Resolve the recipe, or return None where the source has none of its tensors."""


def _resolve(source: Source, name: str) -> tuple[str, str | None] | None:
    """Full names of a module's weight and bias, or of a bare parameter and its bias; None if not there."""
    weight = next((full for full in (f"{name}.weight", name, f"{name}_weight") if full in source), None)
    bias = next((full for full in (f"{name}.bias", f"{name}_bias") if full in source), None)
    return None if weight is None else (weight, bias)


def _rows(source: Source, name: str, *, transposed: bool) -> int:
    shape = source.shape(name)
    return shape[-1] if transposed or len(shape) == 1 else shape[-2]


@dataclass(frozen=True)
class Take(Recipe):
    """One module (`name.weight`, `name.bias`) or bare parameter (`name`, `name_bias`), rows in order."""

    name: str
    transposed: bool = False

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """See `Recipe.plan`."""
        return Stack((self.name,), self.transposed).plan(source, spec)


def Conv1D(name: str) -> Take:  # noqa: N802 - a verb of the recipes' small language, beside Take and Stack
    """One module whose matrix is stored `(in, out)`, as GPT-2's `Conv1D` does."""
    return Take(name, transposed=True)


@dataclass(frozen=True)
class Stack(Recipe):
    """Modules stacked by rows: separate q, k and v; gate and up; one norm per head.

    A name with `*` stands for all modules that have a number in that place, in ascending order.
    """

    names: tuple[str, ...]
    transposed: bool = False

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """See `Recipe.plan`.

        Where only some modules have a bias, the bias of the others is zero.

        Raises:
            WeightError: Only some of the modules are there, or a bias does not have one number per output.
        """
        names = [full for name in self.names for full in _expand(source, name)]
        resolved = {name: _resolve(source, name) for name in names}
        missing = [name for name, pair in resolved.items() if pair is None]
        if len(missing) == len(names):
            return None
        if missing:
            raise WeightError(f"{', '.join(missing)} missing beside {', '.join(set(names) - set(missing))}")
        pairs = [pair for pair in resolved.values() if pair is not None]
        weight = tuple(
            Piece(w, 0, _rows(source, w, transposed=self.transposed), transposed=self.transposed)
            for w, _ in pairs
        )
        rows = [piece.count for piece in weight]
        for (_, b), n in zip(pairs, rows, strict=True):
            if b is not None and source.shape(b)[-1] != n:
                raise WeightError(
                    f"{b} has shape {tuple(source.shape(b))}, but there are {n} outputs: torch broadcasts "
                    "it, a fused block does not; expand it to one number per output"
                )
        biases = [Piece(b or "", 0, n, bias=True) for (_, b), n in zip(pairs, rows, strict=True)]
        return Plan(weight, tuple(biases) if any(piece.name for piece in biases) else ())


def _expand(source: Source, name: str) -> list[str]:
    if "*" not in name:
        return [name]
    pattern = re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"\.weight")
    found = [
        (int(match[1]), match[0].removesuffix(".weight"))
        for n in source.names()
        if (match := pattern.fullmatch(n))
    ]
    return [full for _, full in sorted(found)] or [name]


@dataclass(frozen=True)
class Interleaved(Recipe):
    """One fused projection whose rows come in groups, each with its own rows of q, k and v.

    Attributes:
        name: The fused module.
        groups: Number of groups; None for one per kv head (BLOOM, GPT-NeoX, Falcon).
        order: Order of q, k and v within a group.
        transposed: The matrix is stored `(in, out)`.
    """

    name: str
    groups: int | None = None
    order: Literal["qkv", "qvk"] = "qkv"
    transposed: bool = False

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """See `Recipe.plan`."""
        whole = Take(self.name, self.transposed).plan(source, spec)
        if whole is None:
            return None
        groups = self.groups or spec.kv_heads
        if groups == 1 and self.order == "qkv":
            return whole
        rows = {"q": spec.q_dim // groups, "k": spec.kv_dim // groups, "v": spec.kv_dim // groups}
        offset = {part: sum(rows[p] for p in self.order[: self.order.index(part)]) for part in self.order}
        size = sum(rows.values())
        runs = [(g * size + offset[part], rows[part]) for part in "qkv" for g in range(groups)]

        def spread(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
            return tuple(replace(p, start=start, count=count) for p in pieces for start, count in runs)

        return Plan(spread(whole.weight), spread(whole.bias))


@dataclass(frozen=True)
class First(Recipe):
    """The first recipe whose tensors are all there, for classes whose part names depend on the config."""

    recipes: tuple[Recipe, ...]

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """See `Recipe.plan`.

        Raises:
            WeightError: No recipe finds all of its tensors, and at least one of them finds some.
        """
        half: WeightError | None = None
        for recipe in self.recipes:
            try:
                plan = recipe.plan(source, spec)
            except WeightError as error:
                half = half or error
                continue
            if plan is not None:
                return plan
        if half is not None:
            raise half
        return None


@dataclass(frozen=True)
class Unit(Recipe):
    """A norm that has no weight (OLMo)."""

    def plan(self, source: Source, spec: BlockSpec) -> Plan | None:
        """Return a plan without pieces: the role exists, and its weight is all ones."""
        return Plan((), ())


def cut(pieces: Sequence[Piece], runs: Sequence[range]) -> tuple[Piece, ...]:
    """Return the pieces that cover the given canonical rows, in the order of `runs`.

    Args:
        pieces: A role's pieces in canonical order.
        runs: Ranges of canonical rows, each of step 1.
    """
    return tuple(part for run in runs for part in _overlaps(pieces, run))


def _overlaps(pieces: Sequence[Piece], run: range) -> Iterator[Piece]:
    offset = 0
    for piece in pieces:
        low, high = max(run.start, offset), min(run.stop, offset + piece.count)
        if low < high:
            yield replace(piece, start=piece.start + (low - offset) * piece.step, count=high - low)
        offset += piece.count


def gather(source: Source, pieces: Sequence[Piece], part: Slice = WHOLE) -> Tensor:
    """Read the pieces and join them.

    Args:
        source: Where the tensors are.
        pieces: Not empty.
        part: Selects the input columns of a matrix and the experts of a stack; its rows are not used.

    Returns:
        The canonical tensor: a view of the source where it is a single piece with all columns and experts,
        else a new tensor, which keeps no other memory of the source alive.
    """
    parts = []
    like = next((piece.name for piece in pieces if piece.name), None)
    for piece in pieces:
        if not piece.name:
            whole = source.read(like or next(iter(source.names())))
            parts.append(whole.new_zeros((*(whole.shape[:-1] if like else ()), piece.count)))
            continue
        own = None if part.is_whole else _made(source, piece, part)
        if own is not None and len(pieces) == 1:
            return own
        parts.append(narrowed(piece.of(source.read(piece.name)), piece, part) if own is None else own)
    if len(parts) > 1:
        return torch.cat(parts, dim=-1 if _is_flat(pieces[0], parts[0]) else -2)
    return parts[0] if part.is_whole else parts[0].clone(memory_format=torch.contiguous_format)


def _made(source: Source, piece: Piece, part: Slice) -> Tensor | None:
    """A part of a piece that the source can make without making the rest; None where it cannot."""
    if piece.step != 1 or piece.transposed or piece.bias or piece.experts:
        return None
    rows = (range(piece.start, piece.start + piece.count),)
    return source.part(piece.name, rows, part.columns, part.experts)


def narrowed(rows: Tensor, piece: Piece, part: Slice) -> Tensor:
    """Return a piece's rows narrowed, as a view, to the columns and experts of a part."""
    flat = _is_flat(piece, rows)
    if part.columns is not None and not flat:
        rows = rows[..., part.columns.start : part.columns.stop]
    if part.experts is not None and rows.dim() > (1 if flat else 2):
        rows = rows[part.experts.start : part.experts.stop]
    return rows


def _is_flat(piece: Piece, part: Tensor) -> bool:
    return piece.bias or part.dim() == 1


def scatter(pieces: Sequence[Piece], canonical: Tensor) -> dict[str, Tensor]:
    """Undo `gather`: return the source tensors that a canonical tensor was assembled from.

    Args:
        pieces: The same pieces; together they must cover whole source tensors.
        canonical: `(..., rows, in)` or `(rows,)`.

    Returns:
        Tensors by name: views of `canonical` where a source tensor was one piece, else new tensors.
    """
    axis = -1 if _is_flat(pieces[0], canonical) else -2
    parts: dict[str, list[tuple[Piece, Tensor]]] = {}
    offset = 0
    for piece in pieces:
        if piece.name:
            parts.setdefault(piece.name, []).append((piece, canonical.narrow(axis, offset, piece.count)))
        offset += piece.count
    out = {}
    for name, runs in parts.items():
        first, rows = runs[0]
        if len(runs) == 1:
            out[name] = first.back(rows)
            continue
        shape = list(canonical.shape)
        shape[axis] = sum(piece.count for piece, _ in runs)
        whole = canonical.new_empty(shape)
        for piece, rows in runs:
            replace(piece, transposed=False, experts=0).of(whole).copy_(rows)
        out[name] = first.back(whole).contiguous()
    return out
