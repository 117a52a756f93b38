"""An engine on several ranks: what each of them has of the model, said and done in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from slipstream.config import InferenceConfig
from slipstream.devices import Device
from slipstream.errors import InjectionError, SlipstreamError, UnsupportedError, WeightError
from slipstream.model.convert import move
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.layers import Found
from slipstream.model.outside import OutsidePlan, pack_outside
from slipstream.model.report import OutsideReport
from slipstream.model.vocabulary import split_vocabulary
from slipstream.parallel import Axis, Mesh, open_mesh
from slipstream.parallel.agree import agree_on_engine
from slipstream.parallel.collectives import gather_objects

__all__ = ["agree_on_layers", "first_writes", "join", "place", "refuse_on_ranks", "split_or_pack"]


def join(model: nn.Module, config: InferenceConfig) -> Mesh:
    """Find the ranks that share the model, and see that they were asked for one thing.

    Raises:
        ConfigError: Too few processes, or ranks that disagree.
        UnsupportedError: What several ranks do not do.
    """
    mesh = open_mesh(config)
    agree_on_engine(model, config, mesh)
    packs = config.weight_format or config.head_format or config.quant.embedding_format
    if not mesh.is_alone and config.save_mp_checkpoint_path is not None and packs:
        raise UnsupportedError(
            f"save_mp_checkpoint_path={config.save_mp_checkpoint_path!r} of packed weights on "
            f"{mesh.replica.size} ranks, each of which has a part of every plane; write them in one process "
            "(`slipstream quantize`): the folder loads at any degree"
        )
    if not mesh.is_alone and config.zero.offload_param.device != "none":
        raise UnsupportedError(
            f"zero.offload_param.device={config.zero.offload_param.device!r} on {mesh.replica.size} ranks: "
            "layers are streamed in one process alone; drop one of them"
        )
    return mesh


def refuse_on_ranks(replica: Axis, what: str) -> None:
    """Refuse what one process does with a whole model.

    Raises:
        UnsupportedError: The model is on several ranks.
    """
    if replica.size > 1:
        raise UnsupportedError(
            f"{what} writes to whole tensors, and each of {replica.size} ranks has a part of them; make a "
            "new engine, whose checkpoint has the new weights"
        )


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


def split_or_pack(
    model: nn.Module, plans: Sequence[OutsidePlan], settings: Settings
) -> tuple[tuple[OutsideReport, ...], list[str]]:
    """Pack what stands outside of the layers, and spread its rows over the ranks where there are several.

    Returns:
        Rows for the report, and notes.
    """
    mesh = settings.mesh
    if mesh.tp.size == 1:
        return tuple(pack_outside(model, plans, settings.filling)), []
    rows, notes = split_vocabulary(model, plans, settings.bind(None).linear, mesh.tp)
    first = f"rank {mesh.replica.ranks[mesh.replica.rank]}: layers are split over {mesh.tp.size} ranks"
    return tuple(rows), [f"{first} ({', '.join(map(str, mesh.tp.ranks))})", *notes]
