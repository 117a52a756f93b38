"""An engine on several ranks: joining them, checking that they agree, and placing each one's part."""

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
    """Return the mesh of ranks that share the model, after checking that they have the same configuration.

    Raises:
        ConfigError: Too few processes, or ranks that disagree.
        UnsupportedError: A setting that is not supported on several ranks.
    """
    mesh = open_mesh(config)
    agree_on_engine(model, config, mesh)
    return mesh


def agree_on_adapter(read: Callable[[], Adapter], replica: Axis) -> Adapter:
    """Read an adapter, and check that all ranks have read the same one.

    Raises:
        SlipstreamError: Reading failed on this rank.
        WeightError: Reading failed on another rank, or the adapters differ.
    """
    adapters: list[Adapter] = []

    def values() -> dict[str, Tensor]:
        adapters.append(read())
        tensors = dict(adapters[0].whole)
        for path, pair in adapters[0].low_rank.items():
            scale = torch.tensor([pair.scale], device="cpu")
            tensors |= {f"{path}.lora_A": pair.a, f"{path}.lora_B": pair.b, f"{path}.scale": scale}
        return tensors

    agree_on_values(values, replica)
    return adapters[0]


def agree_on_names(names: Sequence[str], replica: Axis) -> None:
    """Check that all ranks activate the same adapters.

    Raises:
        ConfigError: They do not.
    """
    given = [names] if replica.size == 1 else gather_objects(names, replica, "compared adapters")
    other = next((rank for rank, own in zip(replica.ranks, given, strict=True) if own != names), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} activates the adapters {list(given[replica.ranks.index(other)])}, and this rank "
            f"{list(names)}; give every rank the same names"
        )


@contextmanager
def failing_together(replica: Axis) -> Iterator[None]:
    """Make an error on one rank an error on all of them, so that none is left waiting.

    The body must not communicate between ranks.

    Raises:
        SlipstreamError: This rank's error, or one of the same class as another rank's, naming that rank.
    """
    error: SlipstreamError | None = None
    try:
        yield
    except SlipstreamError as failure:
        error = failure
    own = None if error is None else (type(error), str(error))
    failures = [own] if replica.size == 1 else gather_objects(own, replica, "prepared an engine")
    if error is not None:
        raise error
    for rank, failed in zip(replica.ranks, failures, strict=True):
        if failed is not None:
            raise failed[0](f"rank {rank}: {failed[1]}")


def first_writes(replica: Axis, write: Callable[[], None]) -> None:
    """Call `write` on the first rank; the other ranks wait, and fail if it fails.

    Raises:
        SlipstreamError: The first rank's error.
    """
    error: SlipstreamError | OSError | None = None
    if replica.rank == 0:
        try:
            write()
        except (SlipstreamError, OSError) as failure:
            error = failure
    reason = None if error is None else str(error)
    if replica.size > 1:
        reason = gather_objects(reason, replica, "wrote a checkpoint")[0]
    if error is not None:
        raise error
    if reason is not None:
        raise WeightError(f"rank {replica.ranks[0]} could not write: {reason}")


def place(model: nn.Module, device: Device, config: InferenceConfig, now: bool) -> None:
    """Move the model to its device if `now`, unless it is kept on the host."""
    if now and not config.keep_module_on_host:
        move(model, device.torch_device)


def agree_on_layers(layers: Sequence[Found], verdicts: Mapping[str, Verdict], mesh: Mesh) -> None:
    """Check that all ranks fuse the same layers, before the model is changed.

    Raises:
        InjectionError: They do not.
        UnsupportedError: Experts cannot be spread over ranks as configured.
    """
    if mesh.is_alone:
        return
    whole = [found.name for found in layers if verdicts[found.name].returns is None]
    found = gather_objects(whole, mesh.replica, "compared which layers are fused")
    if any(other != whole for other in found):
        raise InjectionError(
            f"the ranks {list(mesh.replica.ranks)} do not fuse the same layers; use the same model and the "
            "same kind of machine for all of them"
        )
    _refuse_whole_experts(layers, verdicts, mesh)


def _refuse_whole_experts(layers: Sequence[Found], verdicts: Mapping[str, Verdict], mesh: Mesh) -> None:
    """Refuse expert parallelism if no layer has experts, or if a layer is not fused and would keep all."""
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
            f"moe.ep_size={mesh.expert_places} cannot spread all experts ({reason}); only experts of fused "
            "blocks are spread (replace_with_kernel_inject=True)"
        )


def split_or_pack(
    model: nn.Module, plans: Sequence[OutsidePlan], settings: Settings
) -> tuple[tuple[OutsideReport, ...], list[str]]:
    """Pack the parts outside the layers (embedding, head), splitting their rows over several ranks if any.

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
    """Describe how experts are spread, if ranks hold whole ones."""
    own = next((block.share.mesh for block, _ in _hosts(model) if block.share is not None), None)
    if own is None:
        return
    split = f", each split over {own.slices} ranks" if own.slices > 1 else ""
    why = "" if own is mesh else " (they are narrower than a group of the weight format for each rank)"
    place = f"of which this is number {own.expert_place}"
    yield f"experts are spread over {own.expert_places} places{split}{why}, {place}"


@contextmanager
def taking_part(mesh: Mesh, model: nn.Module, kind: str, values: Mapping[str, Any]) -> Iterator[Axis]:
    """Run a call as one that all ranks make, or as this rank's own if the ranks share only experts.

    Yields:
        The ranks that run the same call, which have the same tokens and random numbers.

    Raises:
        RequestError: Ranks that split layers between them received different calls.
    """
    if agree_on_call(kind, values, mesh):
        yield mesh.replica
        return
    with apart(mesh.ep, [(block, host) for block, host in _hosts(model)]):
        yield mesh.tp


def _hosts(model: nn.Module) -> Iterator[tuple[Block, Host]]:
    """Yield the layers whose experts are spread over ranks, in the model's order."""
    for block in (injected_state(module).block for module in model.modules() if is_injected(module)):
        if block.share is not None and block.share.spreads_experts:
            weight = block.weights.matrices[Role.EXPERTS_OUT]
            some = weight.planes[0]
            dtype = some.dtype if weight.dtype is None else weight.dtype
            yield block, Host(block.share, block.mix, block.spec.hidden, dtype, some.device)
