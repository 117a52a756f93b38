"""Plans and applies the split over ranks of layers, and of parts of fused layers, that run their own code."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from zlib import crc32

from torch import nn

from slipstream.config import InferenceConfig
from slipstream.errors import InjectionError, UnsupportedError
from slipstream.families import Family
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.fused.layer_changes import parts_of
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.layers import Found
from slipstream.model.policy import target_of
from slipstream.model.report import SplitReport
from slipstream.model.tensor_parallel.autotp import LayerPlan
from slipstream.model.tensor_parallel.mixers import own_parts, plan_parts
from slipstream.model.tensor_parallel.plan_layers import plan_layers, record_layers
from slipstream.model.tensor_parallel.sizes import Sizes
from slipstream.model.tensor_parallel.split import ModuleSplit, cut_tensors, is_split, join_ranks
from slipstream.model.weights.packing import PackPlan
from slipstream.parallel.collectives import gather_objects
from slipstream.parallel.rehearse import Live
from slipstream.parallel.shard import Slice

__all__ = ["Splitting", "plan_splitting"]


@dataclass(frozen=True)
class Splitting:
    """How everything that is not fused is split over ranks.

    Attributes:
        layers: The layers that are not fused, or only in part.
        plans: Plans by layer name; a layer without a plan is fused as a whole.
        settings: Has the ranks, and the format.
    """

    layers: Sequence[Found]
    plans: Mapping[str, LayerPlan]
    settings: Settings

    def cut(self, packing: Mapping[str, Sequence[PackPlan]]) -> dict[str, Slice]:
        """Reduce every tensor to this rank's part, in place.

        Returns:
            The rank's slices of matrices that are cut only while they are packed, by full name, because
            their rows share scales with other ranks' parts, or because the source has packed planes.
        """
        rank = self.settings.mesh.tp.rank
        runs: dict[str, Slice] = {}
        for found, split in self._splits():
            while_packed = {}
            for plan in packing.get(found.name, ()):
                own = split.get(plan.path)
                cut = None if own is None else own.cuts.get(plan.name)
                matrix = found.layer.get_submodule(plan.path).get_parameter(plan.name)
                inputs = matrix.dim() - (2 if plan.transposed else 1)
                if cut is None:
                    continue
                if cut.dim == inputs and self.settings.format.columns is not None:
                    while_packed[f"{plan.path}.{plan.name}"] = Slice(columns=cut.runs[rank][0])
                elif cut.dim != inputs and self._has_planes(f"{found.name}.{plan.path}.{plan.name}"):
                    while_packed[f"{plan.path}.{plan.name}"] = Slice(cut.runs[rank])
            self._cut(found, split, rank, while_packed)
            runs |= {f"{found.name}.{name}": run for name, run in while_packed.items()}
        return runs

    def _has_planes(self, name: str) -> bool:
        """Whether the source of the weights stores a matrix in a packed format."""
        filling = self.settings.filling
        return filling is not None and filling.awaits(name) and filling.source.is_packed(name)

    def _cut(self, found: Found, split: dict[str, ModuleSplit], rank: int, whole: Collection[str]) -> None:
        """Cut one layer's tensors, except those named in `whole`; only the parts are read of a checkpoint."""
        filling = self.settings.filling
        cut = [f"{path}.{name}" for path, own in split.items() for name in (*own.cuts, *own.once)]
        read = {name: f"{found.name}.{name}" for name in cut if name not in whole}
        done = set(whole)
        if filling is not None:
            for path, own in split.items():
                for leaf, one in own.cuts.items():
                    name = f"{path}.{leaf}"
                    if name in read and filling.lay_part(read[name], one.dim, one.runs[rank]):
                        done.add(name)
            filling.lay(full for name, full in read.items() if name not in done)
        cut_tensors(found.layer, split, rank, whole=done)
        if filling is None:
            return
        for name, full in read.items():
            path, _, leaf = name.rpartition(".")
            part = found.layer.get_submodule(path)._parameters.get(leaf)
            if part is not None:
                part.data = self.settings.cast(full, part.data)
        filling.release(read.values())

    def join(self) -> None:
        """Add the communication between ranks to split modules; must run after the last change of classes."""
        for found, split in self._splits():
            join_ranks(found.layer, split, Live(self.settings.mesh.tp))
            if is_injected(found.layer):
                injected_state(found.layer).parts = parts_of(found.layer)

    def _splits(self) -> list[tuple[Found, dict[str, ModuleSplit]]]:
        """Return each layer's split, without modules that it shares with an earlier layer."""
        seen: set[int] = set()
        splits = []
        for one in self.layers:
            plan = self.plans.get(one.name)
            own = {}
            for path, split in plan.split.items() if plan is not None else ():
                module = one.layer.get_submodule(path)
                if id(module) not in seen and not is_split(module):
                    own[path] = split
                seen.add(id(module))
            splits.append((one, own))
        return splits

    def rows(self) -> tuple[SplitReport, ...]:
        """Return rows for the report, under the model's names."""
        named = ((one.name, row) for one in self.layers for row in self._rows_of(one.name))
        return tuple(replace(row, name=f"{name}.{row.name}") for name, row in named)

    def _rows_of(self, name: str) -> tuple[SplitReport, ...]:
        plan = self.plans.get(name)
        return () if plan is None else plan.rows


def plan_splitting(
    model: nn.Module,
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    settings: Settings,
    config: InferenceConfig,
) -> Splitting:
    """Plan the split of every layer that is not fused; the model is only read.

    Raises:
        UnsupportedError: Nothing can be split.
        InjectionError: The ranks' plans differ, or a policy does not fit the model.
    """
    mesh = settings.mesh
    whole = [found for found in layers if verdicts[found.name].returns is None]
    if mesh.is_alone or (layers and not whole and mesh.tp.size == 1):
        return Splitting((), {}, settings)
    mixed = [found for found in layers if verdicts[found.name].returns is not None and own_parts(found)]
    if not layers:
        raise UnsupportedError(
            f"{len(mesh.replica.ranks)} ranks cannot share a {type(model).__name__}, which has no layers "
            "that repeat; use one process"
        )
    if mesh.ep.size > 1 and whole:
        raise UnsupportedError(
            f"moe.ep_size={mesh.ep.size} spreads whole experts of fused blocks, and {whole[0].name} runs its "
            f"own code ({verdicts[whole[0].name].reason}); use replace_with_kernel_inject=True, or "
            "tensor_parallel.tp_size, which cuts every expert"
        )
    named: dict[str, Sequence[str]] = {}
    for found in whole:
        target = target_of(config.injection_policy, type(found.layer))
        if target is not None and not isinstance(target, Family):
            named[found.name] = target
    align = 16 // settings.dtype.itemsize
    grain, group = config.tensor_parallel.tp_grain_size, max(settings.format.group, 1)
    sizes = Sizes(mesh.tp.size, grain, group, align)
    strict = settings.check == "error"
    with nullcontext() if settings.filling is None else settings.filling.lending(layers):
        calls = record_layers(model, [*whole, *mixed])
    plans = plan_layers(model, whole, sizes, calls, reducing=named, strict=strict, lent=settings.lent)
    plans |= plan_parts(mixed, sizes, calls, settings.lent)
    mine: list[tuple[str, ...]] = [(name, r.name, r.how) for name, plan in plans.items() for r in plan.rows]
    mine += [(name, repr(sorted(_runs(plan).items()))) for name, plan in plans.items()]
    if any(other != mine for other in gather_objects(mine, mesh.replica, "compared how layers are split")):
        raise InjectionError(
            f"the ranks {list(mesh.replica.ranks)} would split the layers differently; use the same model "
            "and the same kind of machine for all of them"
        )
    return Splitting([*whole, *mixed], plans, settings)


def _runs(plan: LayerPlan) -> dict[str, int]:
    """Return checksums of how a layer's tensors are cut, for comparison between ranks."""
    return {
        f"{path}.{name}": crc32(repr(cut).encode())
        for path, own in plan.split.items()
        for name, cut in own.cuts.items()
    }
