"""The rows and columns of each role that a rank holds: query heads with their kv heads, gate with up.

Shapes: C hidden, H heads, K kv heads, D head dim, F feed-forward width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.errors import ConfigError, UnsupportedError
from slipstream.parallel.mesh import Axis, Mesh
from slipstream.spec import BlockSpec, Role

__all__ = ["WHOLE", "Share", "Slice", "Turns", "deal_heads", "levelled", "loads_of", "share_of", "spread"]


@dataclass(frozen=True)
class Slice:
    """The part of a role's canonical tensor that a rank holds; None in a field selects everything.

    Attributes:
        rows: Runs of output rows, in order.
        columns: Input columns.
        experts: Experts, along the leading dim.
        bias: Whether the rank holds the bias: where ranks' results are summed, only one rank adds it.
    """

    rows: tuple[range, ...] | None = None
    columns: range | None = None
    experts: range | None = None
    bias: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether the slice selects the whole matrix."""
        return self.rows is None and self.columns is None and self.experts is None


WHOLE = Slice()
"""The slice that selects all of a role."""

_EVEN = 1.05
"""A layer counts as evenly cut while its largest part is at most this multiple of the mean part."""


def spread(total: int, parts: int, unit: int = 1) -> list[range]:
    """Split `range(total)` as evenly as possible at multiples of `unit`; the first runs are the longer."""
    units = -(-total // unit)
    whole, longer = divmod(units, parts)
    starts = [min((index * whole + min(index, longer)) * unit, total) for index in range(parts + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def levelled(total: int, held: Sequence[float], unit: int = 1) -> list[range]:
    """Split `range(total)` so that the parts, together with what they hold already, are as even as possible.

    Args:
        total: Number of items; at least as many units as there are parts, since each part gets one or more.
        held: What each part holds already, in the same items.
        unit: Runs start at multiples of this.
    """
    parts = len(held)
    if max(held) - min(held) < 1e-6 * total:
        return spread(total, parts, unit)
    units, counts, free = -(-total // unit), [1.0] * parts, set(range(parts))
    while True:  # a part that already holds more than the level gets one unit, which lowers the others' level
        level = (units - parts + len(free) + sum(held[part] / unit for part in free)) / len(free)
        full = {part for part in free if level - held[part] / unit < 1 - 1e-9}
        if not full or full == free:
            break
        free -= full
    for part in free:
        counts[part] = level - held[part] / unit
    whole = [int(count + 1e-9) for count in counts]
    short = sorted(range(parts), key=lambda part: (whole[part] - counts[part], part))
    for part in short[: units - sum(whole)]:
        whole[part] += 1
    stops = [min(sum(whole[: part + 1]) * unit, total) for part in range(parts)]
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


class Turns:
    """Rotates, layer by layer, which ranks get the larger parts where heads cannot be dealt evenly.

    Without the rotation, the same ranks would hold more of every layer, and so more of the model. With it, a
    rank that waits for others in some layers is the one waited for in other layers.
    """

    def __init__(self, size: int) -> None:
        """Start with `size` ranks that hold nothing yet."""
        self._loads = [0] * size

    def next(self, own: Sequence[int], of_heads: Sequence[int], turn: int | None = None) -> int:
        """Return the next layer's turn: rank r gets the part dealt to place `(r + turn) % size`.

        Args:
            own: Number of the layer's weights that each rank holds at turn 0.
            of_heads: How many of them belong to heads; only an uneven split of these leads to a turn.
            turn: A turn that is already decided, to be recorded.
        """
        size = len(own)
        if turn is None:
            uneven = min(max(own) / max(sum(own), 1), max(of_heads) / max(sum(of_heads), 1)) * size > _EVEN
            turns = range(size) if uneven else range(1)
            turn = min(turns, key=lambda turn: sum(load**2 for load in self._after(own, turn)))
        self._loads = self._after(own, turn)
        return turn

    def _after(self, own: Sequence[int], turn: int) -> list[int]:
        return [had + own[(rank + turn) % len(own)] for rank, had in enumerate(self._loads)]


@dataclass(frozen=True)
class Share:
    """A rank's part of one block.

    Query heads stay with their kv heads. Where there are fewer kv heads than ranks, several ranks hold the
    same kv head and divide its query heads.

    Attributes:
        whole: Spec of the whole block.
        spec: Spec of the rank's part: its heads, kv heads, slopes and feed-forward width.
        heads: The rank's query heads.
        kv_heads: The rank's kv heads.
        counts_keys: Whether the rank is the first of those that hold these kv heads.
        ffn: The rank's units of the feed-forward, or of each of its experts where several ranks split them.
        shared: The rank's units of the shared experts.
        experts: The rank's experts.
        mesh: The ranks.
        unit: Feed-forwards are cut at multiples of this, the group size of the weight format.
        turn: Rotation of the places to which heads are dealt (`Turns`).
    """

    whole: BlockSpec
    spec: BlockSpec
    heads: range
    kv_heads: range
    counts_keys: bool
    ffn: range
    shared: range
    experts: range
    mesh: Mesh
    unit: int
    turn: int = 0

    @property
    def tp(self) -> Axis:
        """The ranks that split the layer."""
        return self.mesh.tp

    @property
    def spreads_experts(self) -> bool:
        """Whether other ranks hold experts that this rank does not."""
        return self.whole.moe is not None and self.mesh.expert_places > 1

    def owner(self, expert: int) -> int:
        """Return which of the `mesh.expert_places` places holds an expert."""
        runs = spread(self.whole.moe.experts if self.whole.moe else 0, self.mesh.expert_places)
        return next(place for place, run in enumerate(runs) if expert in run)

    def at(self, place: int) -> Share:
        """Return the share of another rank of the replica, for inspection only."""
        return _share(self.whole, self.mesh.at(place), self.unit, self.turn)

    def slice(self, role: Role, rows: int, dims: int) -> Slice:
        """Return the rank's slice of a role.

        Args:
            role: A role of the block.
            rows: Rows of the whole role; tells whether a norm of queries or keys spans one head or all.
            dims: Number of dims of the model's own tensor; a norm with two has a row per head.
        """
        first, dim, spec = self.tp.rank == 0, self.spec.head_dim, self.whole
        q, kv = _scaled(self.heads, dim), _scaled(self.kv_heads, dim)
        if role in (Role.EXPERTS_IN, Role.EXPERTS_OUT):
            return self._of_experts(role)
        if self.tp.size == 1:
            return Slice()
        match role:
            case Role.QKV:
                return Slice(
                    (
                        q,
                        _moved(kv, spec.q_dim),
                        _moved(kv, spec.q_dim + spec.kv_dim),
                        *self._gates(spec, q),
                    )
                )
            case Role.CROSS_Q:
                return Slice((q,))
            case Role.CROSS_KV:
                return Slice((kv, _moved(kv, spec.kv_dim)))
            case Role.ATTN_OUT | Role.CROSS_OUT:
                return Slice(columns=q, bias=first)
            case Role.MLP_IN:
                return Slice(self._halves(self.ffn, spec.ffn))
            case Role.MLP_OUT:
                return Slice(columns=self.ffn, bias=first)
            case Role.SHARED_IN:
                return Slice(self._halves(self.shared, spec.moe.shared if spec.moe else 0))
            case Role.SHARED_OUT:
                return Slice(columns=self.shared, bias=first)
            case Role.SINKS:
                return Slice((self.heads,))
            case Role.Q_NORM if dims == 2:
                return Slice((self.heads,))
            case Role.K_NORM if dims == 2:
                return Slice((self.kv_heads,))
            case Role.Q_NORM if rows == spec.q_dim and rows != dim:
                return Slice((q,))
            case Role.K_NORM if rows == spec.kv_dim and rows != dim:
                return Slice((kv,))
        return Slice()

    def _gates(self, spec: BlockSpec, q: range) -> tuple[range, ...]:
        """The rank's rows of the attention's output gate, which follow q, k and v."""
        if spec.gate is None:
            return ()
        own = self.heads if spec.gate.per == "head" else q
        return (_moved(own, spec.q_dim + 2 * spec.kv_dim),)

    def _of_experts(self, role: Role) -> Slice:
        """The rank's slice of the experts: some experts, a part of each, or both."""
        experts = self.experts if self.mesh.expert_places > 1 else None
        if self.mesh.slices == 1:
            return Slice(experts=experts)
        if role is Role.EXPERTS_IN:
            return Slice(self._halves(self.ffn, self.whole.ffn), experts=experts)
        return Slice(columns=self.ffn, experts=experts, bias=self.mesh.slice == 0)

    def _halves(self, run: range, width: int) -> tuple[range, ...]:
        return (run, _moved(run, width)) if self.whole.gated else (run,)


def _scaled(run: range, factor: int) -> range:
    return range(run.start * factor, run.stop * factor)


def _moved(run: range, offset: int) -> range:
    return range(run.start + offset, run.stop + offset)


def share_of(spec: BlockSpec, mesh: Mesh, group: int = 0, turn: int = 0) -> Share | None:
    """Return this rank's part of a block, or None where the rank holds all of it.

    Args:
        spec: The whole block.
        mesh: The ranks.
        group: Number of inputs that share a scale in the weight format, or 0.
        turn: Rotation of the places to which heads are dealt (`Turns`).

    Raises:
        ConfigError: There are more ranks than heads, feed-forward units or experts.
        UnsupportedError: The block cannot be split, as with latent attention or a family's own attention.
    """
    moe, mesh = spec.moe, _around_experts(spec, mesh, group)
    tp, ep, slices = mesh.tp.size, mesh.expert_places, 1 if moe is None else mesh.slices
    if tp == 1 and (ep == 1 or moe is None):
        return None
    if spec.latent is not None and tp > 1:
        raise UnsupportedError(
            f"tensor_parallel.tp_size={tp}: latent attention is not split; use only moe.ep_size, or one rank"
        )
    if spec.own_attention:
        raise UnsupportedError(
            f"tensor_parallel.tp_size={tp}: attention in windows or blocks cannot be split; use one rank"
        )
    beside = spec.beside or (moe is not None and moe.beside)
    if (spec.course is not None or spec.branches != "both" or beside) and tp > 1:
        raise UnsupportedError(
            f"tensor_parallel.tp_size={tp}: a layer with an unusual order of branches cannot be split; "
            "use one rank"
        )
    if spec.inner_norms and tp > 1:
        raise UnsupportedError(
            f"tensor_parallel.tp_size={tp}: a norm within a branch needs values that would be on several "
            "ranks; use one rank"
        )
    if tp > 1 and (spec.sharing != "own" or spec.values != "own"):
        raise UnsupportedError(
            f"tensor_parallel.tp_size={tp}: keys and values shared by layers cannot be split; use one rank"
        )
    if spec.twice and ep > 1:
        raise UnsupportedError(
            f"moe.ep_size={ep}: experts parallel to half of their layer cannot be spread; use one rank"
        )
    if tp > spec.heads:
        raise ConfigError(
            f"tensor_parallel.tp_size={tp} is more than the {spec.heads} attention heads of a layer; use "
            f"{spec.heads} at most"
        )
    if slices > spec.ffn or (moe is None and tp > spec.ffn) or (moe is not None and 0 < moe.shared < tp):
        narrow = min(spec.ffn, moe.shared) if moe is not None and moe.shared else spec.ffn
        raise ConfigError(
            f"tensor_parallel.tp_size={tp} is more than the {narrow} units of a layer's feed-forward; use "
            f"{narrow} at most"
        )
    if moe is not None and ep > moe.experts:
        raise ConfigError(
            f"moe.ep_size={ep} is more than the {moe.experts} experts of a layer; use {moe.experts} at most"
        )
    return _share(spec, mesh, max(group, 1), turn)


def _around_experts(spec: BlockSpec, mesh: Mesh, group: int) -> Mesh:
    """The mesh for a block: experts too narrow for one scale group per rank are dealt whole, not cut."""
    moe, size = spec.moe, mesh.tp.size
    if moe is None or mesh.expert_places > 1 or spec.ffn >= group * size or moe.experts < size:
        return mesh
    return replace(mesh, inner=size)


def loads_of(spec: BlockSpec, mesh: Mesh, group: int = 0) -> tuple[list[int], list[int]]:
    """Return how many weights of a block each rank holds at turn 0, and how many of them belong to heads.

    All zero for a block whose experts are spread as well: there heads do not decide which rank holds more.
    """
    size, mesh = mesh.tp.size, _around_experts(spec, mesh, group)
    if size == 1 or mesh.replica.size != size or mesh.expert_places > 1:
        return [0] * size, [0] * size
    shares = [_share(spec, mesh.at(place), max(group, 1), 0) for place in range(size)]
    experts, feed = 1 if spec.moe is None else spec.moe.experts, 3 if spec.gated else 2
    of_heads = [spec.hidden * _of_heads(spec, s.heads, s.kv_heads) for s in shares]
    units = [spec.hidden * feed * (experts * len(s.ffn) + len(s.shared)) for s in shares]
    return [attention + feed_units for attention, feed_units in zip(of_heads, units, strict=True)], of_heads


def deal_heads(heads: int, kv_heads: int, parts: int, place: int) -> tuple[range, range, bool]:
    """Return the query heads and kv heads of the rank at a place.

    Returns:
        Its query heads, its kv heads, and whether it is the first of the ranks that hold these kv heads.
    """
    per_key = heads // kv_heads
    if kv_heads >= parts:
        own = spread(kv_heads, parts)[place]
        return _scaled(own, per_key), own, True
    owners = spread(parts, kv_heads)
    key = next(index for index, ranks in enumerate(owners) if place in ranks)
    within = place - owners[key].start
    queries = _moved(spread(per_key, len(owners[key]))[within], key * per_key)
    return queries, range(key, key + 1), within == 0


def _share(spec: BlockSpec, mesh: Mesh, unit: int, turn: int) -> Share:
    tp, rank = mesh.tp.size, mesh.tp.rank
    heads, kv_heads, counts = deal_heads(spec.heads, spec.kv_heads, tp, (rank + turn) % tp)
    moe, shared, experts = spec.moe, range(0), range(0)
    parts, part_of = (tp, rank) if moe is None else (mesh.slices, mesh.slice)
    held = _held(spec, tp) if parts == tp and mesh.expert_places == 1 else [0.0] * parts
    held = [held[(place + turn) % parts] for place in range(parts)] if parts == tp else held

    def dealt(units: int, own: Sequence[float]) -> list[range]:
        even = units >= unit * len(own) or (moe is not None and -(-units // unit) >= len(own))
        return levelled(units, [units * h for h in own], unit if even else 1)

    ffn = dealt(spec.ffn, held)[part_of]
    if moe is not None:
        shared = dealt(moe.shared, held if len(held) == tp else [0.0] * tp)[rank] if moe.shared else shared
        experts = spread(moe.experts, mesh.expert_places)[mesh.expert_place]
        moe = replace(moe, shared=len(shared))
    part = replace(
        spec,
        heads=len(heads),
        kv_heads=len(kv_heads),
        ffn=len(ffn),
        alibi=None if spec.alibi is None else spec.alibi[heads.start : heads.stop],
        moe=moe,
    )
    return Share(spec, part, heads, kv_heads, counts, ffn, shared, experts, mesh, unit, turn)


def _held(spec: BlockSpec, parts: int) -> list[float]:
    """Each rank's attention weights, as a multiple of the number of weights in the feed-forward.

    Used to compensate, in the split of the feed-forward, for heads that are not dealt evenly.
    """
    moe = spec.moe
    width = spec.ffn if moe is None else spec.ffn * moe.experts + moe.shared
    feed = spec.hidden * width * (3 if spec.gated else 2)
    if spec.mixer is not None or spec.feeder is not None or spec.branches != "both":
        return [0.0] * parts
    dealt = [deal_heads(spec.heads, spec.kv_heads, parts, place)[:2] for place in range(parts)]
    return [spec.hidden * _of_heads(spec, queries, keys) / feed for queries, keys in dealt]


def _of_heads(spec: BlockSpec, queries: Sequence[int], keys: Sequence[int]) -> int:
    """Number of rows, each of the hidden width, that belong to some heads in a block's matrices."""
    branches, gates = 1 if spec.cross is None else 2, 0 if spec.gate is None else 1
    return branches * spec.head_dim * ((2 + gates) * len(queries) + 2 * len(keys))
