"""Loads a block's weights from a source; checks shapes and refuses missing or superfluous tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from slipstream.errors import UnsupportedError, WeightError
from slipstream.formats import Format
from slipstream.ops.linear import Weight
from slipstream.parallel.shard import Slice
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Piece, Plan, Recipe, gather, scatter
from slipstream.weights.source import Source

__all__ = [
    "BlockWeights",
    "Vector",
    "lies_transposed",
    "load_block",
    "may_be_packed",
    "own_views",
    "part_of_planes",
    "plan_block",
    "read_matrix",
    "restore_block",
]


@dataclass(frozen=True)
class Vector:
    """A norm's weight and bias, or another small tensor of a role, in the dtype of the model.

    Attributes:
        weight: `(n,)`, or None for ones.
        bias: `(n,)` or None.
    """

    weight: Tensor | None
    bias: Tensor | None = None


@dataclass(frozen=True)
class BlockWeights:
    """A block's tensors by role.

    Attributes:
        matrices: Weights of linear layers.
        vectors: Norms, sinks and other small tensors; the block lacks the part of an absent role.
        lease: Context in which the planes of streamed matrices hold their values; None where they always do.
    """

    matrices: Mapping[Role, Weight]
    vectors: Mapping[Role, Vector]
    lease: AbstractContextManager[None] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        matrix = next(iter(self.matrices.values()), None)
        if matrix is not None:
            return matrix.planes[0].device
        return next(t.device for v in self.vectors.values() for t in (v.weight, v.bias) if t is not None)

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which every tensor holds its values."""
        return nullcontext() if self.lease is None else self.lease

    def settled(self) -> BlockWeights:
        """Return weights that need no lease: with streamed matrices copied, or `self` if there are none."""
        if self.lease is None:
            return self
        with self.lease:
            copied = {role: weight.apply(torch.clone) for role, weight in self.matrices.items()}
        return replace(self, matrices=copied, lease=None)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> BlockWeights:
        """Return weights whose tensors `fn` has moved or cast; planes of streamed matrices stay as they are.

        Raises:
            UnsupportedError: `fn` would cast streamed matrices.
        """

        def vector(v: Vector) -> Vector:
            return Vector(*(None if t is None else fn(t) for t in (v.weight, v.bias)))

        vectors = {role: vector(v) for role, v in self.vectors.items()}
        if self.lease is None:
            matrices = {role: w.apply(fn) for role, w in self.matrices.items()}
        else:
            matrices = {role: _streamed(w, fn) for role, w in self.matrices.items()}
        return replace(self, matrices=matrices, vectors=vectors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        vectors = [t for v in self.vectors.values() for t in (v.weight, v.bias) if t is not None]
        return sum(w.nbytes for w in self.matrices.values()) + sum(
            t.numel() * t.element_size() for t in vectors
        )


def _streamed(weight: Weight, fn: Callable[[Tensor], Tensor]) -> Weight:
    """Apply `fn` to the bias of a streamed matrix; its planes stay as they are."""
    if fn(torch.empty(0, dtype=(dtype := weight.computes_in), device="cpu")).dtype != dtype:
        raise UnsupportedError(
            f"streamed weights stay in {dtype}; set another dtype when the engine is built, or leave zero out"
        )
    return weight if weight.bias is None else replace(weight, bias=fn(weight.bias))


def plan_block(
    source: Source, recipes: Mapping[Role, Recipe], spec: BlockSpec, *, ignored: tuple[str, ...] = ()
) -> dict[Role, Plan]:
    """Resolve a family's recipes against a layer, without reading any tensor.

    Args:
        source: The layer's tensors.
        recipes: The family's recipes, for every role that any of its layers has.
        spec: Spec of this layer; determines which matrices are required, and their shapes.
        ignored: Patterns of tensor names that carry no weight of the block.

    Raises:
        WeightError: A matrix is missing or has the wrong shape, or a source tensor belongs to no role.
    """
    wanted = spec.matrix_shapes()
    plans: dict[Role, Plan] = {}
    for role, recipe in recipes.items():
        if (role.is_matrix and role not in wanted) or (role.is_cross and spec.cross is None):
            continue
        plan = recipe.plan(source, spec)
        # A part that runs its own code keeps its norms, even where a role's recipe matches their names.
        if plan is not None and not any(fnmatchcase(n, one) for n in plan.names for one in ignored):
            plans[role] = plan
    missing = [role for role in wanted if role not in plans]
    if missing:
        raise WeightError(
            f"the layer has no tensor for the role {', '.join(missing)}; it has {_listing(source)}"
        )
    for role, shape in wanted.items():
        found = _shape(source, plans[role])
        if found != shape:
            raise WeightError(f"{role} has shape {found}, but the config requires {shape}")
    used = {name for plan in plans.values() for name in plan.names}
    over = [
        n for n in source.names() if n not in used and not any(fnmatchcase(n, pattern) for pattern in ignored)
    ]
    if over:
        raise WeightError(f"{', '.join(over)} has no role in this family and would be lost")
    return plans


def _shape(source: Source, plan: Plan) -> tuple[int, ...]:
    first = plan.weight[0]
    shape = first.lead(source.shape(first.name))
    lead, inputs = shape[:-2], shape[-2] if first.transposed else shape[-1]
    return (*lead, sum(piece.count for piece in plan.weight), inputs)


def _listing(source: Source) -> str:
    names = sorted(source.names())
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def load_block(
    source: Source,
    plans: Mapping[Role, Plan],
    *,
    matrix_format: Format,
    plain: Format,
    plain_roles: frozenset[Role] = frozenset(),
    join: bool = False,
    by_rows: bool = False,
) -> BlockWeights:
    """Read a block's tensors and pack its matrices.

    Args:
        source: The layer's tensors, in the engine's dtype and on its device.
        plans: From `plan_block`, cut to the rank's part where there are several ranks.
        matrix_format: Format of the roles that may be quantized.
        plain: Format of routers and other matrices that stay dense.
        plain_roles: Further roles that stay dense.
        join: Store each dense matrix as one plane with contiguous rows; this copies a matrix that the source
            has in several tensors or transposed. The layer's own tensors can then become views of the
            plane, and their former memory can be released.
        by_rows: Copy dense matrices that are stored transposed to contiguous rows, but keep one plane per
            source tensor.
    """
    matrices: dict[Role, Weight] = {}
    vectors: dict[Role, Vector] = {}
    for role, plan in plans.items():
        bias = gather(source, plan.bias, plan.slice) if plan.bias else None
        if role.is_matrix:
            wanted = matrix_format if may_be_packed(role, plain_roles) else plain
            ready = source.packed(role, wanted, plan.whole or plan.weight) if wanted.bits else None
            ready = None if ready is None else part_of_planes(ready, plan.slice, wanted)
            if ready is None:
                ready = read_matrix(source, plan, bias, wanted, join=join, by_rows=by_rows)
            matrices[role] = replace(ready, bias=bias)
        else:
            weight = gather(source, plan.weight, plan.slice).flatten() if plan.weight else None
            vectors[role] = Vector(weight, bias)
    return BlockWeights(matrices, vectors)


def may_be_packed(role: Role, plain_roles: frozenset[Role]) -> bool:
    """Whether a role's matrix is stored in the engine's weight format; other matrices stay dense."""
    return role.is_quantizable and role not in plain_roles


def lies_transposed(piece: Piece, tensor: Tensor) -> bool:
    """Whether a source tensor is stored transposed, in memory of this process alone.

    Memory that processes share does not count: copying it by rows would give each process a copy. Nor do
    inference tensors, which cannot be given other memory.
    """
    return (
        piece.transposed
        and not piece.experts
        and tensor.dim() > 1
        and not (tensor.is_meta or tensor.mT.is_contiguous() or tensor.is_shared() or tensor.is_inference())
    )


def read_matrix(
    source: Source,
    plan: Plan,
    bias: Tensor | None,
    matrix_format: Format,
    *,
    join: bool = False,
    by_rows: bool = False,
) -> Weight:
    """Read and pack a role's matrix; a rank's columns keep the whole matrix's scales if the format can."""
    columns = plan.slice.columns
    if columns is not None and matrix_format.columns is not None:
        whole = gather(source, plan.weight, replace(plan.slice, columns=None))
        made = matrix_format.part(whole, bias, columns)
        if made.inside is None or whole.dim() == 2:
            return made  # ops on stacks of experts do not support `inside`
        return matrix_format.weight(whole[..., columns.start : columns.stop].contiguous(), bias)
    if matrix_format.name != "plain" or not plan.is_whole:
        return matrix_format.weight(gather(source, plan.weight, plan.slice), bias)
    if join:
        return matrix_format.weight(gather(source, plan.weight).contiguous(), bias)
    planes = tuple(_rows_of(piece, source.read(piece.name), by_rows) for piece in plan.weight)
    shape = (*planes[0].shape[:-2], sum(plane.shape[-2] for plane in planes), planes[0].shape[-1])
    return Weight(matrix_format.name, shape, planes, matrix_format.unpack, bias)


def _rows_of(piece: Piece, tensor: Tensor, by_rows: bool) -> Tensor:
    rows = piece.of(tensor)
    return rows.contiguous() if by_rows and lies_transposed(piece, tensor) else rows


def part_of_planes(ready: Weight, part: Slice, packed: Format) -> Weight | None:
    """Cut a rank's part from packed planes; None where the part has to be packed from dense values."""
    if part.is_whole:
        return ready
    shape, planes, inside = ready.shape, ready.planes, None
    if part.experts is not None:
        planes = tuple(plane[part.experts.start : part.experts.stop] for plane in planes)
        shape = (len(part.experts), *shape[1:])
    if part.rows is not None:
        *others, last = planes
        runs = [slice(run.start, run.stop) for run in part.rows]
        rows = [torch.cat([plane[..., run, :] for run in runs], dim=-2) for plane in others]
        planes = (*rows, torch.cat([last[..., run] for run in runs], dim=-1))
        shape = (*shape[:-2], sum(map(len, part.rows)), shape[-1])
    if part.columns is not None:
        wide = packed.whole_groups(part.columns, shape[-1])
        if packed.columns is None or (wide != part.columns and len(shape) > 2):
            return None
        shape, planes = (*shape[:-1], len(wide)), packed.columns(planes, wide)
        inside = packed.inside(part.columns, wide)
    return replace(ready, shape=shape, planes=tuple(p.contiguous() for p in planes), inside=inside)


def restore_block(weights: BlockWeights, plans: Mapping[Role, Plan]) -> dict[str, Tensor]:
    """Return the layer's own tensors by name, restored from the block's: the inverse of `load_block`.

    Returns:
        Views of the block's tensors where possible (see `own_views`), else new tensors; only new tensors
        where the matrices are streamed (on lease). Vectors are flat.
    """
    if weights.lease is not None:
        with weights.lease:
            tensors_on_lease = restore_block(replace(weights, lease=None), plans)
            return {name: tensor.clone() for name, tensor in tensors_on_lease.items()}
    tensors: dict[str, Tensor] = {}
    for role, matrix in weights.matrices.items():
        views = _matrix_views(matrix, plans[role])
        tensors |= scatter(plans[role].weight, matrix.dense()) if views is None else views
    for _, pieces, joined in _vectors(weights, plans):
        views = _vector_views(pieces, joined)
        tensors |= scatter(pieces, joined) if views is None else views
    return tensors


def own_views(weights: BlockWeights, plans: Mapping[Role, Plan]) -> dict[str, Tensor | None]:
    """Return the layer's own tensors as views of the block's; None for each that no view can represent.

    Vectors are flat.
    """
    own: dict[str, Tensor | None] = {}
    for role, matrix in weights.matrices.items():
        views = _matrix_views(matrix, plans[role]) if weights.lease is None else None
        own |= views or dict.fromkeys(p.name for p in plans[role].weight)
    for plan, pieces, joined in _vectors(weights, plans):
        is_whole = plan.slice.rows is None and plan.slice.experts is None
        views = _vector_views(pieces, joined) if is_whole else None
        own |= views or dict.fromkeys(piece.name for piece in pieces if piece.name)
    return own


def _vectors(
    weights: BlockWeights, plans: Mapping[Role, Plan]
) -> Iterator[tuple[Plan, Sequence[Piece], Tensor]]:
    """All vectors of a block, including biases of matrices, each with its plan and its pieces."""
    pairs = [(plans[role], plans[role].bias, matrix.bias) for role, matrix in weights.matrices.items()]
    for role, vector in weights.vectors.items():
        plan = plans[role]
        pairs += [(plan, plan.weight, vector.weight), (plan, plan.bias, vector.bias)]
    return ((plan, pieces, joined) for plan, pieces, joined in pairs if joined is not None)


def _matrix_views(weight: Weight, plan: Plan) -> dict[str, Tensor] | None:
    if weight.format != "plain" or not plan.is_whole:
        return None
    planes: tuple[Tensor, ...] = weight.planes
    if len(planes) == 1:
        planes = planes[0].split([piece.count for piece in plan.weight], dim=-2)
    runs = list(zip(plan.weight, planes, strict=True))
    if any(piece.experts and not piece.lies_flat(rows) for piece, rows in runs):
        return None
    return {piece.name: piece.back(rows) for piece, rows in runs}


def _vector_views(pieces: Sequence[Piece], joined: Tensor) -> dict[str, Tensor] | None:
    """Views of a vector, a bias, or biases of experts by source name; None where there can be no views."""
    if len(pieces) == 1:
        return {pieces[0].name: joined}
    named = [piece.name for piece in pieces if piece.name]
    if len(set(named)) < len(named) or any(piece.step != 1 for piece in pieces):
        return None
    runs = joined.split([piece.count for piece in pieces], dim=-1)
    return {piece.name: run for piece, run in zip(pieces, runs, strict=True) if piece.name}
