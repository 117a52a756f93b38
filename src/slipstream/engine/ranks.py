"""An engine on several ranks: what each of them has of the model, said and done in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import InferenceConfig
from slipstream.devices import Device
from slipstream.errors import ConfigError, InjectionError, SlipstreamError, UnsupportedError, WeightError
from slipstream.model.block.block import Block
from slipstream.model.convert import move
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.layers import Found
from slipstream.model.report import OutsideReport
from slipstream.model.tensor_parallel.vocabulary import split_vocabulary
from slipstream.model.weights.embedding_and_head import OutsidePlan, pack_outside
from slipstream.parallel import Axis, Mesh, open_mesh
from slipstream.parallel.agree import agree_on_call, agree_on_engine, agree_on_values
from slipstream.parallel.collectives import gather_objects
from slipstream.parallel.experts import Host, apart
from slipstream.spec import Role
from slipstream.weights.lora import Adapter

__all__ = [
    "agree_on_adapter",
    "agree_on_layers",
    "agree_on_names",
    "failing_together",
    "first_writes",
    "join",
    "place",
    "split_or_pack",
    "taking_part",
]


def join(model: nn.Module, config: InferenceConfig) -> Mesh:
    """Find the ranks that share the model, and see that they were asked for one thing.

    Raises:
        ConfigError: Too few processes, or ranks that disagree.
        UnsupportedError: What several ranks do not do.
    """
    mesh = open_mesh(config)
    agree_on_engine(model, config, mesh)
    return mesh


def agree_on_adapter(read: Callable[[], Adapter], replica: Axis) -> Adapter:
    """An adapter, once all ranks have read it, and the same one.

    Raises:
        SlipstreamError: What reading it raised here.
        WeightError: What it raised elsewhere, or adapters that differ.
    """
    found: list[Adapter] = []

    def values() -> dict[str, Tensor]:
        found.append(read())
        tensors = dict(found[0].whole)
        for path, pair in found[0].low_rank.items():
            scale = torch.tensor([pair.scale], device="cpu")
            tensors |= {f"{path}.lora_A": pair.a, f"{path}.lora_B": pair.b, f"{path}.scale": scale}
        return tensors

    agree_on_values(values, replica)
    return found[0]


def agree_on_names(names: Sequence[str], replica: Axis) -> None:
    """See that all ranks put the same adapters to work.

    Raises:
        ConfigError: They do not.
    """
    told = [names] if replica.size == 1 else gather_objects(names, replica, "compared adapters")
    other = next((rank for rank, own in zip(replica.ranks, told, strict=True) if own != names), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} puts the adapters {list(told[replica.ranks.index(other)])} to work, and this one "
            f"{list(names)}; give every rank the same names"
        )


@contextmanager
def failing_together(replica: Axis) -> Iterator[None]:
    """Within, where ranks do not meet, what fails on one of them fails on all: none is left waiting.

    Raises:
        SlipstreamError: What was raised here, or of its kind, with the rank, what was raised elsewhere.
    """
    error: SlipstreamError | None = None
    try:
        yield
    except SlipstreamError as failure:
        error = failure
    own = None if error is None else (type(error), str(error))
    told = [own] if replica.size == 1 else gather_objects(own, replica, "prepared an engine")
    if error is not None:
        raise error
    for rank, said in zip(replica.ranks, told, strict=True):
        if said is not None:
            raise said[0](f"rank {rank}: {said[1]}")


def first_writes(replica: Axis, write: Callable[[], None]) -> None:
    """Let the first rank write what all of them have put together; the others wait, and hear if it failed.

    Raises:
        SlipstreamError: What the first rank raised.
    """
    error: SlipstreamError | OSError | None = None
    if replica.rank == 0:
        try:
            write()
        except (SlipstreamError, OSError) as failure:
            error = failure
    told = None if error is None else str(error)
    if replica.size > 1:
        told = gather_objects(told, replica, "wrote a checkpoint")[0]
    if error is not None:
        raise error
    if told is not None:
        raise WeightError(f"rank {replica.ranks[0]} could not write: {told}")


def place(model: nn.Module, device: Device, config: InferenceConfig, now: bool) -> None:
    """Move the model to its device, if it is to be there and the time has come."""
    if now and not config.keep_module_on_host:
        move(model, device.torch_device)


def agree_on_layers(layers: Sequence[Found], verdicts: Mapping[str, Verdict], mesh: Mesh) -> None:
    """See that all ranks fuse the same layers, before the model is changed.

    Raises:
        InjectionError: They do not.
    """
    if mesh.is_alone:
        return
    whole = [found.name for found in layers if verdicts[found.name].returns is None]
    found = gather_objects(whole, mesh.replica, "compared which layers are fused")
    if any(other != whole for other in found):
        raise InjectionError(
            f"the ranks {list(mesh.replica.ranks)} do not fuse the same layers; give all of them one model, "
            "and machines of one kind"
        )
    _refuse_whole_experts(layers, verdicts, mesh)


def _refuse_whole_experts(layers: Sequence[Found], verdicts: Mapping[str, Verdict], mesh: Mesh) -> None:
    """Refuse to spread experts where there are none, or where a layer would keep all of its own."""
    if mesh.expert_places == 1:
        return
    mixed = [found for found in layers if found.spec is not None and found.spec.moe is not None]
    kept = [found.name for found in mixed or layers if verdicts[found.name].returns is None]
    if not mixed or kept:
        reason = f"{kept[0]}: {verdicts[kept[0]].reason}" if kept else "no layer of this model has experts"
        fed = next((found for found in layers if found.spec is not None and found.spec.feeder), None)
        if fed is not None and fed.spec is not None:
            reason = f"{fed.name}: its {fed.spec.feeder} run their own code"
        raise UnsupportedError(
            f"moe.ep_size={mesh.expert_places} has nothing to spread, or not all of it ({reason}); only "
            "experts of fused blocks are spread (replace_with_kernel_inject=True)"
        )


def split_or_pack(
    model: nn.Module, plans: Sequence[OutsidePlan], settings: Settings
) -> tuple[tuple[OutsideReport, ...], list[str]]:
    """Pack what stands outside of the layers, and spread its rows over the ranks where there are several.

    Returns:
        Rows for the report, and notes.
    """
    mesh = settings.mesh
    here = f"rank {mesh.replica.ranks[mesh.replica.rank]}"
    spread = [f"{here}: {place}" for place in _places_of_experts(mesh, model)]
    if mesh.tp.size == 1:
        return tuple(pack_outside(model, plans, settings)), spread
    rows, notes = split_vocabulary(model, plans, settings, mesh.tp)
    first = f"{here}: layers are split over {mesh.tp.size} ranks ({', '.join(map(str, mesh.tp.ranks))})"
    return tuple(rows), [first, *spread, *notes]


def _places_of_experts(mesh: Mesh, model: nn.Module) -> Iterator[str]:
    """Where the experts are, if ranks have whole ones."""
    own = next((block.share.mesh for block, _ in _hosts(model) if block.share is not None), None)
    if own is None:
        return
    split = f", each split over {own.slices} ranks" if own.slices > 1 else ""
    why = "" if own is mesh else " (they are narrower than a group of the weight format for each rank)"
    place = f"and this is number {own.expert_place}"
    yield f"experts are spread over {own.expert_places} places{split}{why}, {place}"


@contextmanager
def taking_part(mesh: Mesh, model: nn.Module, kind: str, values: Mapping[str, Any]) -> Iterator[Axis]:
    """Within, a call runs that all ranks make, or that is this one's own where ranks only share experts.

    Yields:
        The ranks that run the same call, whose tokens and random numbers are the same.

    Raises:
        RequestError: Ranks that split layers were given different calls.
    """
    if agree_on_call(kind, values, mesh):
        yield mesh.replica
        return
    with apart(mesh.ep, [(block, host) for block, host in _hosts(model)]):
        yield mesh.tp


def _hosts(model: nn.Module) -> Iterator[tuple[Block, Host]]:
    """Layers whose experts are spread, in the model's order."""
    for block in (injected_state(module).block for module in model.modules() if is_injected(module)):
        if block.share is not None and block.share.spreads_experts:
            weight = block.weights.matrices[Role.EXPERTS_OUT]
            some = weight.planes[0]
            dtype = some.dtype if weight.dtype is None else weight.dtype
            yield block, Host(block.share, block.mix, block.spec.hidden, dtype, some.device)
