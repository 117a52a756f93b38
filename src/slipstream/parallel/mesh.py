"""Which processes share a model: axes of ranks out of torch.distributed's groups, made or handed in.

The processes of a world are counted tensor-parallel rank first, then expert-parallel rank, then replica: with
`tp_size=2` and `ep_size=2`, ranks 0 and 1 split layers, 0 and 2 spread experts, and 0 to 3 are one replica of
the model; ranks 4 to 7 are the next one, which needs nothing of the first. Where there are fewer processes
than `tp_size * ep_size`, the ranks that split layers spread experts as well: two processes with both sizes 2
split attention, and each has half of the experts, whole.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slipstream.config import InferenceConfig
from slipstream.config.environment import launched
from slipstream.errors import ConfigError
from slipstream.parallel.groups import alive, begin, given, made

__all__ = ["ALONE", "Axis", "Mesh", "open_mesh"]

START_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others at the start of a call: they may still be loading, or idle."""


@dataclass(frozen=True, eq=False)
class Axis:
    """Ranks that do something together.

    Attributes:
        ranks: Their numbers in the world, in order.
        rank: Place of this process among them.
        carries: The group that carries what layers compute; None where there is one rank.
        agrees: The one for what is agreed upon, on the CPU and with a longer patience; None as well.
        patience: How long a rank waits for the others within a step. One that ended is noticed at once, by
            its closed connections; this is for one that hangs, or a network that swallows.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    carries: weakref.ReferenceType[Any] | None = None
    agrees: weakref.ReferenceType[Any] | None = None
    patience: timedelta = timedelta(seconds=35)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def group(self) -> Any:
        """What `carries`.

        Raises:
            DeviceError: It was destroyed.
        """
        return alive(self.carries)

    @property
    def control(self) -> Any:
        """What `agrees`.

        Raises:
            DeviceError: It was destroyed.
        """
        return alive(self.agrees)

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        """Itself: a copy of an engine talks to the same ranks."""
        return self


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that share one model with this process.

    Experts are spread over `ep.size * inner` places. A rank's is `ep.rank * inner + tp.rank % inner`, and
    with the ranks of `tp` that have the same place it splits each of its experts.

    Attributes:
        tp: Those that split layers.
        ep: Those at the same place of other `tp` axes, with which experts are spread.
        replica: All of them, expert-parallel rank by expert-parallel rank.
        inner: Into how many parts the ranks of `tp` spread experts among themselves.
    """

    tp: Axis = Axis()
    ep: Axis = Axis()
    replica: Axis = Axis()
    inner: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether the model belongs to this process only."""
        return self.replica.size == 1

    @property
    def expert_places(self) -> int:
        """How many ways experts are spread: `moe.ep_size`."""
        return self.ep.size * self.inner

    @property
    def expert_place(self) -> int:
        """Which of them is this rank's."""
        return self.ep.rank * self.inner + self.tp.rank % self.inner

    @property
    def slices(self) -> int:
        """How many ranks split an expert."""
        return self.tp.size // self.inner

    @property
    def slice(self) -> int:
        """Which part of each of its experts this rank has."""
        return self.tp.rank // self.inner

    def at(self, place: int) -> Mesh:
        """The mesh as another rank of the replica sees it; only to be looked at."""
        tp = replace(self.tp, rank=place % self.tp.size)
        return replace(self, tp=tp, ep=replace(self.ep, rank=place // self.tp.size))

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        """Itself."""
        return self


ALONE = Mesh()
"""One process, one model."""


def open_mesh(config: InferenceConfig) -> Mesh:
    """Find or make the groups that a configuration asks for.

    Where torch.distributed has not begun, and a launcher such as torchrun left an address, it begins here.

    Raises:
        ConfigError: Too few processes, a size that does not divide them, or a group without this process.
    """
    tensor, experts = config.tensor_parallel, config.moe
    given = _given_group(tensor.mpu, tensor.tp_group)
    if tensor.tp_size == 1 and experts.ep_size == 1 and given is None and experts.ep_group is None:
        return _with_slices(ALONE, experts.ep_mp_group)
    _refuse_no_groups({"tensor_parallel.tp_group": given, "moe.ep_group": experts.ep_group})
    _begin(config)
    patience = timedelta(seconds=tensor.step_timeout)
    if given is not None or experts.ep_group is not None:
        return _of_given(config, given)
    tp, ep, world = tensor.tp_size, experts.ep_size, dist.get_world_size()
    whole = tp * ep if world % (tp * ep) == 0 else math.lcm(tp, ep)
    if world % whole:
        product = f"tensor_parallel.tp_size={tp}" + (f" times moe.ep_size={ep}" if ep > 1 else "")
        raise ConfigError(
            f"{product} does not divide the {world} processes that were started; start {tp * ep} or a "
            "multiple of it (torchrun --nproc-per-node)"
        )
    blocks = [range(first, first + whole) for first in range(0, world, whole)]
    rows = [tuple(block[start : start + tp]) for block in blocks for start in range(0, whole, tp)]
    columns = [tuple(block[start::tp]) for block in blocks for start in range(tp)]
    replicas = [tuple(block) for block in blocks]
    tensor_axis, expert_axis, replica = (_axis_of(parts, patience) for parts in (rows, columns, replicas))
    mesh = Mesh(tensor_axis, expert_axis, replica, ep * tp // whole)
    return _with_slices(mesh, experts.ep_mp_group)


def _refuse_no_groups(groups: Mapping[str, Any]) -> None:
    """Refuse what cannot be a process group, for torch.distributed has made none here."""
    for name, group in groups.items():
        if group is not None and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"{name} is a {type(group).__name__}, and torch.distributed has no groups before "
                "init_process_group; give one of its groups, or leave it out"
            )


def _with_slices(mesh: Mesh, group: Any) -> Mesh:
    """The mesh, held against the group that the user says splits each expert."""
    if group is None:
        return mesh
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"moe.ep_mp_group is a {type(group).__name__}; give a process group, or leave it out"
        )
    found = sorted(dist.get_process_group_ranks(group))
    own = mesh.tp.rank % mesh.inner
    mine = [rank for place, rank in enumerate(mesh.tp.ranks) if place % mesh.inner == own]
    mine = [dist.get_rank()] if mesh.is_alone else mine
    if found != sorted(mine):
        raise ConfigError(
            f"moe.ep_mp_group has the ranks {found}, and by tp_size={mesh.tp.size} and "
            f"ep_size={mesh.expert_places} the ranks {sorted(mine)} split an expert; leave it out"
        )
    return mesh


def _given_group(mpu: Any, group: Any) -> Any:
    """The tensor-parallel group that the user made, if any."""
    if group is not None or mpu is None:
        return group
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if callable(getattr(mpu, name, None)):
            return getattr(mpu, name)()
    raise ConfigError(
        f"tensor_parallel.mpu is a {type(mpu).__name__} without get_model_parallel_group(); give an object "
        "that has it, or the group itself as tensor_parallel.tp_group"
    )


def _begin(config: InferenceConfig) -> None:
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed, which tp_size and ep_size need")
    if dist.is_initialized():
        return
    asked = f"tensor_parallel.tp_size={config.tensor_parallel.tp_size}"
    if config.moe.ep_size > 1:
        asked += f", moe.ep_size={config.moe.ep_size}"
    if not launched():
        count = config.tensor_parallel.tp_size * config.moe.ep_size
        raise ConfigError(
            f"{asked} needs {count} processes, and this one was started alone; start the script with "
            f"torchrun --nproc-per-node {count}, or call torch.distributed.init_process_group in each process"
        )
    begin("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def _of_given(config: InferenceConfig, group: Any) -> Mesh:
    tp, ep = config.tensor_parallel.tp_size, config.moe.ep_size
    experts = config.moe.ep_group
    patience = timedelta(seconds=config.tensor_parallel.step_timeout)
    tensor_axis = replace(_checked("tensor_parallel", "tp_size", tp, group), patience=patience)
    expert_axis = replace(_checked("moe", "ep_size", ep, experts), patience=patience)
    if expert_axis.size == 1:
        return _with_slices(Mesh(tensor_axis, expert_axis, tensor_axis), config.moe.ep_mp_group)
    if tensor_axis.size == 1:
        return _with_slices(Mesh(tensor_axis, expert_axis, expert_axis), config.moe.ep_mp_group)
    if set(expert_axis.ranks) <= set(tensor_axis.ranks):
        return _with_slices(_inside(tensor_axis, expert_axis), config.moe.ep_mp_group)
    rows: list[Any] = [None] * expert_axis.size
    dist.all_gather_object(rows, tensor_axis.ranks, group=expert_axis.control)
    ranks = tuple(rank for row in rows for rank in row)
    if len(set(ranks)) < len(ranks) or len({len(row) for row in rows}) > 1:
        raise ConfigError(
            f"moe.ep_group joins the ranks {list(expert_axis.ranks)}, of the tensor-parallel groups {rows}; "
            "give each rank a group with one rank of several of them, or with ranks of its own alone"
        )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ranks)  # all processes make the groups of all replicas
    mesh = Mesh(tensor_axis, expert_axis, _axis_of(sorted(set(every)), patience))
    return _with_slices(mesh, config.moe.ep_mp_group)


def _inside(tensor: Axis, experts: Axis) -> Mesh:
    """A mesh whose tensor-parallel ranks spread experts among themselves."""
    inner, first = experts.size, tensor.rank - tensor.rank % experts.size
    if tensor.size % inner or tensor.ranks[first : first + inner] != experts.ranks:
        raise ConfigError(
            f"moe.ep_group has the ranks {list(experts.ranks)} of tensor_parallel.tp_group's "
            f"{list(tensor.ranks)}; give each rank a run of them, all runs equally long and in their order"
        )
    return Mesh(tensor, Axis(experts.ranks[experts.rank : experts.rank + 1]), tensor, inner)


def _checked(section: str, key: str, size: int, group: Any) -> Axis:
    """The axis of a group that the user made, held against the size beside it."""
    if group is None:
        if size > 1:
            raise ConfigError(f"{section}.{key}={size} stands beside a group for the other axis; give both")
        return Axis()
    name = "tp_group" if key == "tp_size" else "ep_group"
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"{section}.{name} is a {type(group).__name__}; give a process group of torch.distributed that "
            f"has this process (rank {dist.get_rank()}) in it"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        raise ConfigError(
            f"{section}.{name} has the ranks {list(ranks)}, and this one is {dist.get_rank()}; each rank "
            "hands in the group that it belongs to"
        )
    if size not in (1, len(ranks)):
        raise ConfigError(
            f"{section}.{key}={size} and {section}.{name} has {len(ranks)} ranks; leave {key} out"
        )
    if len(ranks) == 1:
        return Axis(ranks)
    # What is agreed upon is said on the CPU; every rank of this group, and no other, may be here.
    carries = given(group)
    has_cpu = "gloo" in dist.get_backend_config(group)
    agrees = carries if has_cpu else weakref.ref(made((ranks,), "gloo", START_TIMEOUT, by_all=False))
    return Axis(ranks, ranks.index(dist.get_rank()), carries, agrees)


def _axis_of(parts: Sequence[tuple[int, ...]], patience: timedelta) -> Axis:
    """The part of the world that this process belongs to; all processes make the groups of all parts."""
    rank = dist.get_rank()
    ranks = next(part for part in parts if rank in part)
    if len(ranks) == 1:
        return Axis(ranks)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    group = made(tuple(parts), backend, patience)
    control = made(tuple(parts), "gloo", START_TIMEOUT)
    return Axis(ranks, ranks.index(rank), weakref.ref(group), weakref.ref(control), patience)
