"""The processes that share a model: axes of ranks over torch.distributed's groups, created here or given.

In the numbering of a world's processes, the tensor-parallel rank varies fastest, then the expert-parallel
rank, then the replica: with `tp_size=2` and `ep_size=2`, ranks 0 and 1 split layers, 0 and 2 spread experts,
and 0 to 3 are one replica of the model; ranks 4 to 7 are the next replica, which is independent of the first.
Where there are fewer processes than `tp_size * ep_size`, the ranks that split layers spread experts as well:
two processes with both sizes 2 split attention, and each holds half of the experts, whole.
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
    """Ranks that communicate with each other.

    Attributes:
        ranks: Their numbers in the world, in order.
        rank: Place of this process among them.
        carries: The group for tensors that layers compute; None where there is one rank.
        agrees: The group for agreement between ranks, on the CPU and with a longer timeout; None where there
            is one rank.
        patience: How long a rank waits for the others within a step. A rank that ended is noticed at once, by
            its closed connections; the timeout is for a rank that hangs, or a network that drops packets.
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
        """The group that `carries` refers to.

        Raises:
            DeviceError: The group was destroyed.
        """
        return alive(self.carries)

    @property
    def control(self) -> Any:
        """The group that `agrees` refers to.

        Raises:
            DeviceError: The group was destroyed.
        """
        return alive(self.agrees)

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        """Return `self`: a copy of an engine communicates with the same ranks."""
        return self


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that share one model with this process.

    Experts are spread over `ep.size * inner` places. A rank's place is `ep.rank * inner + tp.rank % inner`;
    the ranks of `tp` at the same place split each of its experts.

    Attributes:
        tp: The ranks that split layers.
        ep: The ranks at the same place of other `tp` axes, over which experts are spread.
        replica: All ranks of the model, ordered by expert-parallel rank.
        inner: Number of places over which the ranks of `tp` spread experts among themselves.
    """

    tp: Axis = Axis()
    ep: Axis = Axis()
    replica: Axis = Axis()
    inner: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether this process does not share the model with others."""
        return self.replica.size == 1

    @property
    def expert_places(self) -> int:
        """Number of places over which experts are spread: `moe.ep_size`."""
        return self.ep.size * self.inner

    @property
    def expert_place(self) -> int:
        """This rank's place among the `expert_places`."""
        return self.ep.rank * self.inner + self.tp.rank % self.inner

    @property
    def slices(self) -> int:
        """Number of ranks that split each expert."""
        return self.tp.size // self.inner

    @property
    def slice(self) -> int:
        """The part of each of its experts that this rank holds."""
        return self.tp.rank // self.inner

    def at(self, place: int) -> Mesh:
        """Return the mesh from the view of another rank of the replica, for inspection only."""
        tp = replace(self.tp, rank=place % self.tp.size)
        return replace(self, tp=tp, ep=replace(self.ep, rank=place // self.tp.size))

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        """Return `self`, as `Axis` does."""
        return self


ALONE = Mesh()
"""One process, one model."""


def open_mesh(config: InferenceConfig) -> Mesh:
    """Find or create the groups that a configuration requires.

    Initializes torch.distributed if that has not been done and a launcher such as torchrun set an address.

    Raises:
        ConfigError: There are too few processes, a size does not divide them, or a group lacks this process.
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
    """Refuse given groups while torch.distributed is not initialized: they cannot be process groups."""
    for name, group in groups.items():
        if group is not None and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"{name} is a {type(group).__name__}, and torch.distributed has no groups before "
                "init_process_group; give one of its groups, or leave it out"
            )


def _with_slices(mesh: Mesh, group: Any) -> Mesh:
    """Return the mesh after checking it against the user's group of ranks that split each expert, if any."""
    if group is None:
        return mesh
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"moe.ep_mp_group is a {type(group).__name__}; give a process group, or leave it out"
        )
    given = sorted(dist.get_process_group_ranks(group))
    own = mesh.tp.rank % mesh.inner
    mine = [rank for place, rank in enumerate(mesh.tp.ranks) if place % mesh.inner == own]
    mine = [dist.get_rank()] if mesh.is_alone else mine
    if given != sorted(mine):
        raise ConfigError(
            f"moe.ep_mp_group has the ranks {given}, but with tp_size={mesh.tp.size} and "
            f"ep_size={mesh.expert_places} the ranks {sorted(mine)} split an expert; leave it out"
        )
    return mesh


def _given_group(mpu: Any, group: Any) -> Any:
    """The user's own tensor-parallel group, given directly or through `mpu`, if any."""
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
    wanted = f"tensor_parallel.tp_size={config.tensor_parallel.tp_size}"
    if config.moe.ep_size > 1:
        wanted += f", moe.ep_size={config.moe.ep_size}"
    if not launched():
        count = config.tensor_parallel.tp_size * config.moe.ep_size
        raise ConfigError(
            f"{wanted} needs {count} processes, but this one was started alone; start the script with "
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
            f"moe.ep_group joins the ranks {list(expert_axis.ranks)} of the tensor-parallel groups {rows}; "
            "give each rank a group with one rank of several such groups, or only with ranks of its own"
        )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ranks)  # all processes create the groups of all replicas
    mesh = Mesh(tensor_axis, expert_axis, _axis_of(sorted(set(every)), patience))
    return _with_slices(mesh, config.moe.ep_mp_group)


def _inside(tensor: Axis, experts: Axis) -> Mesh:
    """Make a mesh whose tensor-parallel ranks spread experts among themselves."""
    inner, first = experts.size, tensor.rank - tensor.rank % experts.size
    if tensor.size % inner or tensor.ranks[first : first + inner] != experts.ranks:
        raise ConfigError(
            f"moe.ep_group has the ranks {list(experts.ranks)} of tensor_parallel.tp_group's "
            f"{list(tensor.ranks)}; give each rank consecutive ones in that order, all groups equally large"
        )
    return Mesh(tensor, Axis(experts.ranks[experts.rank : experts.rank + 1]), tensor, inner)


def _checked(section: str, key: str, size: int, group: Any) -> Axis:
    """Make the axis of the user's group, after checking it against the configured size."""
    if group is None:
        if size > 1:
            raise ConfigError(
                f"{section}.{key}={size} is given with a group for the other axis; give groups for both"
            )
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
            f"{section}.{name} has the ranks {list(ranks)}, but this one is {dist.get_rank()}; each rank "
            "passes the group that it belongs to"
        )
    if size not in (1, len(ranks)):
        raise ConfigError(
            f"{section}.{key}={size}, but {section}.{name} has {len(ranks)} ranks; leave {key} out"
        )
    if len(ranks) == 1:
        return Axis(ranks)
    # Agreement runs on the CPU; only the ranks of this group may reach this point.
    carries = given(group)
    has_cpu = "gloo" in dist.get_backend_config(group)
    agrees = carries if has_cpu else weakref.ref(made((ranks,), "gloo", START_TIMEOUT, by_all=False))
    return Axis(ranks, ranks.index(dist.get_rank()), carries, agrees)


def _axis_of(parts: Sequence[tuple[int, ...]], patience: timedelta) -> Axis:
    """Make the axis of the part that this process is in; all processes create the groups of all parts."""
    rank = dist.get_rank()
    ranks = next(part for part in parts if rank in part)
    if len(ranks) == 1:
        return Axis(ranks)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    group = made(tuple(parts), backend, patience)
    control = made(tuple(parts), "gloo", START_TIMEOUT)
    return Axis(ranks, ranks.index(rank), weakref.ref(group), weakref.ref(control), patience)
