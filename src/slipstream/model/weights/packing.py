"""Chooses and packs linears, Conv1D and expert parameters in layers that keep their own code.

Shapes: I input width, O output width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from slipstream.errors import WeightError
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.fused.layer_changes import parts_of
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.layers import Found
from slipstream.model.weights.packed import holds, pack
from slipstream.model.weights.traceable import Seen
from slipstream.ops.linear import Weight
from slipstream.parallel.plan import take
from slipstream.parallel.shard import Slice
from slipstream.spec import Role
from slipstream.weights.load import part_of_planes, plan_block
from slipstream.weights.mapped import MappedFiles
from slipstream.weights.recipe import Plan
from slipstream.weights.source import ModuleSource

__all__ = ["PackPlan", "pack_layers", "plan_packing"]

_ROUTER = re.compile(r"(^|_)(gate|router)$")
_QKV = re.compile(r"^(q|k|v|qkv|query|key|value|query_key_value|c_attn|Wqkv)(_proj|_lin|_attn)?$")


@dataclass(frozen=True)
class PackPlan:
    """One parameter that is packed.

    Attributes:
        path: Path of its module from the layer.
        name: Name of the parameter within the module.
        transposed: The parameter is stored `(..., I, O)`.
        linear: The module consists of this matrix and a bias, so that it can run the op.
    """

    path: str
    name: str
    transposed: bool
    linear: bool


def plan_packing(
    layers: Sequence[Found], verdicts: Mapping[str, Verdict], settings: Settings
) -> dict[str, tuple[PackPlan, ...]]:
    """List the parameters to pack in layers that run their own code; the model is only read.

    These are all linears except routers and the roles that `settings` leaves plain, and parameters of experts
    where a family knows them.

    Args:
        layers: From `find_layers`.
        verdicts: From `judge`.
        settings: Has the format, and the roles that stay plain.

    Returns:
        The plans by layer name, for layers in which anything is packed.
    """
    plans: dict[str, tuple[PackPlan, ...]] = {}
    if settings.format.bits == 0:
        return plans
    for found in layers:
        fused = verdicts[found.name].returns is not None
        chosen = tuple(
            plan for part in _parts(found, fused) for plan in _choose(found, settings.plain_roles, part)
        )
        if chosen:
            plans[found.name] = chosen
    return plans


def _parts(found: Found, fused: bool) -> tuple[str, ...]:
    """Paths of the parts of a layer that run their own code; "" is the whole layer."""
    if not fused:
        return ("",)
    return () if found.family is None or found.spec is None else found.family.own_parts(found.spec)


def _choose(found: Found, plain_roles: frozenset[Role], part: str) -> Iterator[PackPlan]:
    """Yield the parameters to pack in a layer, or in one part of it."""
    roles = _roles(found)
    beside = () if found.family is None or found.spec is None else found.family.ignored
    for path, module in found.layer.named_modules():
        if not path or not f"{path}.".startswith(f"{part}." if part else "") or "forward" in vars(module):
            continue
        if not (_is_linear(module) or _is_conv1d(module)):
            continue
        full, leaf = f"{path}.weight", path.rpartition(".")[2]
        weight = module._parameters.get("weight")
        if any(fnmatchcase(full, pattern) for pattern in beside):
            continue  # the family's block ignores it
        if weight is None or not weight.is_floating_point() or weight.numel() == 0:
            continue
        if full in roles:
            plain = not roles[full][0].is_quantizable or roles[full][0] in plain_roles
        else:
            routes = bool(_ROUTER.search(leaf)) or ".router." in f".{path}"
            plain = routes or (Role.QKV in plain_roles and bool(_QKV.match(leaf)))
        if not plain:
            yield PackPlan(path, "weight", transposed=_is_conv1d(module), linear=True)
    for full, (role, transposed) in ({} if part else roles).items():
        path, _, leaf = full.rpartition(".")
        tensor = found.layer.get_parameter(full)
        if path and tensor.dim() == 3 and role.is_quantizable and role not in plain_roles:
            yield PackPlan(path, leaf, transposed=transposed, linear=False)


def _roles(found: Found) -> dict[str, tuple[Role, bool]]:
    """Role of each matrix of a layer, and whether it is stored transposed; empty if no family knows it."""
    if found.family is None or found.spec is None:
        return {}
    try:
        source = ModuleSource(found.layer)
        plans: Mapping[Role, Plan] = plan_block(
            source, found.family.recipes, found.spec, ignored=found.family.ignores(found.spec)
        )
    except WeightError:
        return {}
    matrices = ((role, piece) for role, plan in plans.items() if role.is_matrix for piece in plan.weight)
    return {piece.name: (role, piece.transposed) for role, piece in matrices}


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def pack_layers(
    layers: Iterable[Found],
    plans: Mapping[str, Sequence[PackPlan]],
    settings: Settings,
    parts: Mapping[str, Slice] | None = None,
) -> dict[str, str]:
    """Pack in place, one parameter at a time; each is released before the next one is read.

    Args:
        layers: Layers that are already in the engine's dtype and on its device.
        plans: From `plan_packing`.
        settings: Has the format and the implementations.
        parts: By full name, this rank's slices of matrices that are still whole.

    Returns:
        The implementation that packed linears run, by name of each layer in which anything is packed.
    """
    bound = settings.bind(None).linear
    mapped = MappedFiles()
    for found in layers:
        for plan in plans.get(found.name, ()):
            module = found.layer.get_submodule(plan.path)
            if holds(module, plan.name):
                continue  # a module that layers share is packed already
            if settings.filling is not None:
                settings.filling.take(f"{found.name}.{plan.path}.bias", settings.cast)
            bias = module._parameters.get("bias") if plan.linear else None
            full = f"{found.name}.{plan.path}.{plan.name}"
            dense = mapped.holding(module.parameters(recurse=False))
            weight = _packed(full, module, plan, settings, (parts or {}).get(full))
            run = Seen(bound.run) if plan.linear else None
            pack(module, plan.name, replace(weight, bias=bias), transposed=plan.transposed, run=run)
            mapped.drop(dense)
        if found.name in plans and is_injected(found.layer):
            injected_state(found.layer).parts = parts_of(found.layer)
    return dict.fromkeys(plans, bound.name)


def _packed(
    full: str, module: nn.Module, plan: PackPlan, settings: Settings, part: Slice | None = None
) -> Weight:
    filling = settings.filling
    if filling is not None and filling.awaits(full):  # else a rank's part has been filled already
        if part is None:
            return filling.packed(full, settings.format, settings.dtype_of(full), transposed=plan.transposed)
        ready = filling.source.packed(full, settings.format)
        ready = None if ready is None else part_of_planes(ready, part, settings.format)
        if ready is not None:
            return replace(ready, dtype=settings.dtype_of(full))
        filling.take(full, settings.cast)
    tensor = module.get_parameter(plan.name).detach()
    dense = tensor.mT if plan.transposed else tensor
    if part is not None and part.columns is not None:
        return settings.format.part(dense, None, part.columns)
    rows = dense if part is None or part.rows is None else take(dense, -2, part.rows)
    return settings.format.weight(rows, None)
