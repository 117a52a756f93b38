"""Spreads the rows of the token embedding and of the vocabulary projection over the ranks of a model.

Each rank keeps its rows, plain or packed. An embedding looks up the rows that the rank holds, and a sum over
the ranks gives the rest, exactly. A projection computes the rank's logits, and the ranks join theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slipstream.errors import InjectionError
from slipstream.formats import FORMATS, Format
from slipstream.model.fuse import Settings
from slipstream.model.report import OutsideReport
from slipstream.model.weights.embedding_and_head import OutsidePlan, found_table, holders
from slipstream.model.weights.packed import looks_up_rows, pack
from slipstream.ops.bind import Bound
from slipstream.ops.linear import Weight
from slipstream.parallel.mesh import Axis
from slipstream.parallel.shard import Slice, spread
from slipstream.parallel.vocabulary import joined_linear, split_rows
from slipstream.weights.load import part_of_planes

__all__ = ["split_vocabulary"]


def split_vocabulary(
    model: nn.Module,
    plans: Sequence[OutsidePlan],
    settings: Settings,
    axis: Axis,
) -> tuple[list[OutsideReport], list[str]]:
    """Spread embedding and projection where possible, in place, in the planned formats.

    Args:
        model: In the engine's dtype.
        plans: From `plan_outside`.
        settings: The engine's settings; the source of its filling may have packed planes already.
        axis: The ranks.

    Returns:
        Rows for the report, and notes on tensors that every rank keeps whole.
    """
    formats: dict[str, Format] = {plan.role: plan.format for plan in plans}
    bound: dict[str, Bound | None] = {plan.role: plan.linear for plan in plans}
    table, head = found_table(model, "get_input_embeddings"), found_table(model, "get_output_embeddings")
    groups: dict[int, list[tuple[str, nn.Module, str]]] = {}
    notes: list[str] = []
    if table is not None:
        for name, module in holders(model, table[1]):
            groups.setdefault(id(module._parameters["weight"]), []).append((name, module, "embedding"))
    if head is not None:
        same = groups.setdefault(id(head[1]._parameters["weight"]), [])
        # A decoder's embedding may be tied to the head, while the model's input embedding is the encoder's.
        same += [] if same else [(*held, "table") for held in holders(model, head[1])]
        same.append((*head, "head"))
    linear = settings.bind(None).linear
    rows: list[OutsideReport] = []
    for members in groups.values():
        why = _why_whole(model, members, axis)
        if why:
            notes.append(f"{members[0][0]} stays whole on every rank: {why}")
            continue
        made: dict[str, Weight] = {}
        for name, module, role in members:
            packed = formats.get(role, FORMATS["plain"])
            is_new = packed.name not in made
            if is_new:
                made[packed.name] = _own_rows(name, module, packed, settings, axis)
            op = bound.get(role) or linear
            run = joined_linear(op.run) if role == "head" else None
            bias = module._parameters.get("bias")
            pack(module, "weight", replace(made[packed.name], bias=bias), run=run)
            kernels = {"linear": op.name} if role == "head" else {}
            size = made[packed.name].nbytes if is_new else 0
            shown = "embedding" if role == "table" else role
            rows.append(OutsideReport(name, shown, kernels, _label(packed, made[packed.name]), size))
    return rows, notes


def _label(packed: Format, weight: Weight) -> str:
    return packed.name if packed.bits else str(weight.dtype).removeprefix("torch.")


def _why_whole(model: nn.Module, members: Sequence[tuple[str, nn.Module, str]], axis: Axis) -> str:
    """The reason why the tensor of these modules is not spread; empty if it is."""
    weight: Any = members[0][1]._parameters["weight"]
    if len(weight) < axis.size:
        return f"it has only {len(weight)} rows"
    known = {id(module) for _, module, _ in members}
    for name, module in model.named_modules():
        if id(module) not in known and any(p is weight for p in module._parameters.values()):
            return f"{name} holds the same tensor"
    for name, module, role in members:
        if role != "head" and not looks_up_rows(module):
            return f"{name} ({type(module).__name__}) does more than look up rows"
        plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
        if role == "head" and not plain:
            return f"{name} ({type(module).__name__}) is not a plain nn.Linear"
    return ""


def _own_rows(name: str, module: nn.Module, packed: Format, settings: Settings, axis: Axis) -> Weight:
    """Make the rank's rows of a module's matrix, and check them against the whole matrix."""
    whole = module.get_parameter("weight").detach()
    runs = spread(len(whole), axis.size)
    own = runs[axis.rank]
    full, filling = f"{name}.weight", settings.filling
    ready = filling.source.packed(full, packed) if filling is not None and packed.bits else None
    if ready is None:
        local = packed.weight(whole[own.start : own.stop].clone(), None)
    else:
        local = replace(part_of_planes(ready, Slice((own,)), packed) or ready, dtype=settings.dtype_of(full))
    weight = split_rows(tuple(whole.shape), local, axis)
    ids = torch.tensor([end for run in runs for end in (run.start, run.stop - 1)], device=whole.device)
    expected, got = whole[ids], weight.rows(ids)
    bound = packed.error + packed.floor + torch.finfo(whole.dtype).eps
    if not float((got - expected).abs().max()) <= bound * float(expected.abs().max()):
        raise InjectionError(f"{name}: the ranks' rows together differ from the whole matrix")
    return weight
