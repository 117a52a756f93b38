"""Packs matrices outside of the layers: the vocabulary projection (head) and the token embedding.

Either may have a format of its own, at every level of injection. Where the two are tied and only the head is
packed, it gets planes and the embedding keeps the tensor; where both are packed in the same format, they
share one set of planes, and the tensor is freed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.errors import InjectionError
from slipstream.formats import Format
from slipstream.model.fuse import Settings
from slipstream.model.report import OutsideReport
from slipstream.model.selfcheck.check import TOLERANCE
from slipstream.model.weights.packed import looks_up_rows, pack
from slipstream.model.weights.traceable import Seen
from slipstream.ops.bind import Bound
from slipstream.ops.linear import Weight
from slipstream.weights.mapped import MappedFiles

__all__ = ["OutsideFormats", "OutsidePlan", "found_table", "holders", "pack_outside", "plan_outside"]

log = logging.getLogger(__name__)

_EDGE = 48
"""Number of rows at either end of a head that are packed and multiplied to check the packed head."""


@dataclass(frozen=True)
class OutsideFormats:
    """The configured formats.

    Attributes:
        head: Format of the vocabulary projection; None leaves it plain.
        embedding: Format of the token embedding; None leaves it plain.
        follows: A head that is tied to a packed embedding takes the embedding's format.
    """

    head: Format | None
    embedding: Format | None
    follows: bool = True


@dataclass(frozen=True)
class OutsidePlan:
    """One matrix outside of the layers that is packed.

    Attributes:
        names: Modules that hold it, the head or embedding itself first; tied tables share their planes.
        role: "head" or "embedding".
        format: The format it is packed in.
        linear: The op that the head runs; None for an embedding.
        shares: The head is tied to the embedding and uses its planes.
    """

    names: tuple[str, ...]
    role: Literal["head", "embedding"]
    format: Format
    linear: Bound | None = None
    shares: bool = False


def plan_outside(
    model: nn.Module,
    wanted: OutsideFormats,
    *,
    bind: Callable[[Format], Bound],
    dtype: torch.dtype,
    device: torch.device,
    strict: Literal["error", "fallback", "off"],
) -> tuple[list[OutsidePlan], list[str]]:
    """Decide which matrices are packed; the model is only read.

    Args:
        model: Any model; nothing is packed without `get_output_embeddings` and `get_input_embeddings`.
        wanted: The formats.
        bind: Chooses the implementation of a linear for a format.
        dtype: The engine's dtype.
        device: Device on which implementations run; the model may still be elsewhere.
        strict: What to do if the packed head computes wrong products.

    Returns:
        Plans, the embedding's before the head's, and notes on what stays plain.

    Raises:
        InjectionError: The packed head disagrees with the original matrix.
    """
    table = None if wanted.embedding is None else found_table(model, "get_input_embeddings")
    plans, notes = _plan_embedding(model, table, wanted.embedding)
    projection = None if wanted.head is None else found_table(model, "get_output_embeddings")
    if wanted.head is None or projection is None:
        return plans, notes
    name, module = projection
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return plans, [*notes, f"{name} stays plain: {type(module).__name__} is not a plain nn.Linear"]
    is_tied = bool(plans) and table is not None and table[1].weight is module.weight
    head = plans[0].format if is_tied and wanted.follows else wanted.head
    bound = bind(head)
    try:
        if strict != "off":
            _prove(name, _edges(module.weight, dtype).to(device), head, bound)
    except InjectionError as error:
        if strict == "error":
            raise
        log.warning("%s", error)
        return plans, [*notes, str(error)]
    shares = is_tied and plans[0].format.name == head.name
    return [*plans, OutsidePlan((name,), "head", head, bound, shares)], notes


def _plan_embedding(
    model: nn.Module, table: tuple[str, Any] | None, wanted: Format | None
) -> tuple[list[OutsidePlan], list[str]]:
    if wanted is None:
        return [], []
    if table is None:
        return [], [f"no embedding is packed: get_input_embeddings of {type(model).__name__} gives no matrix"]
    name, module = table
    own = [other for other, holder in holders(model, module) if looks_up_rows(holder)]
    if name not in own:
        return [], [f"{name} stays plain: {type(module).__name__} does more than look up rows"]
    return [OutsidePlan((name, *(other for other in own if other != name)), "embedding", wanted)], []


def found_table(model: nn.Module, getter: str) -> tuple[str, Any] | None:
    """Path and module of a transformers model's input or output embedding, or None."""
    get: Any = getattr(model, getter, None)
    try:
        module = get() if callable(get) else None
    except (NotImplementedError, AttributeError):
        return None
    weight = module._parameters.get("weight") if isinstance(module, nn.Module) else None
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        return None
    return next(((name, part) for name, part in model.named_modules() if part is module), None)


def holders(model: nn.Module, table: nn.Module) -> list[tuple[str, nn.Module]]:
    """All embeddings that hold the same tensor, such as an encoder's and a decoder's."""
    weight = table._parameters["weight"]
    every = model.named_modules()
    return [(n, m) for n, m in every if isinstance(m, nn.Embedding) and m._parameters.get("weight") is weight]


def _edges(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The first and the last rows of a matrix, in a dtype."""
    own = matrix.detach()
    return (torch.cat((own[:_EDGE], own[-_EDGE:])) if len(own) > 2 * _EDGE else own).to(dtype)


def _prove(name: str, rows: Tensor, packed: Format, bound: Bound) -> None:
    """Compare the op on some packed rows with a product by their unpacked values.

    Raises:
        InjectionError: The packed rows or the products are off by more than rounding explains.
    """
    dtype = rows.dtype
    weight = packed.weight(rows, None)
    dense = weight.dense()
    off, largest = float((dense - rows).abs().max()), float(rows.abs().max())
    if not off <= largest * (packed.error + packed.floor + torch.finfo(dtype).eps):
        raise InjectionError(f"{name} is off by {off:.3g} once packed as {packed.name}; the format is wrong")
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5):
        x = torch.randn(count, rows.shape[1], generator=generator, dtype=torch.float32, device="cpu").to(rows)
        expected, got = F.linear(x, dense).float(), bound.run(x, weight).float()
        size = float(expected.square().mean().sqrt())
        error = float((got - expected).abs().max())
        if not error <= TOLERANCE[dtype] * max(size, 1e-3):
            raise InjectionError(
                f"{name}: products by {bound.name} with {packed.name} weights have an error of {error:.3g} "
                f'at results of size {size:.3g}; use injection_check="fallback" to leave it plain'
            )


def pack_outside(model: nn.Module, plans: Sequence[OutsidePlan], settings: Settings) -> list[OutsideReport]:
    """Pack in place, once the model is in the engine's dtype and on its device.

    Args:
        model: The model that the plans are for.
        plans: From `plan_outside`.
        settings: The engine's settings; the source of its filling may have packed planes already.

    Returns:
        A report row for each plan.
    """
    rows = []
    filling = settings.filling
    planes: Weight | None = None
    mapped = MappedFiles()
    for plan in plans:
        first: Any = model.get_submodule(plan.names[0])
        stored = mapped.holding(first.parameters(recurse=False))
        if plan.shares and planes is not None:
            weight = planes
        else:
            dense, full = first._parameters["weight"].detach(), f"{plan.names[0]}.weight"
            ready = None if filling is None else filling.source.packed(full, plan.format)
            if ready is None:
                weight = plan.format.weight(dense, None)
            else:
                weight = replace(ready, dtype=settings.dtype_of(full))
        if plan.role == "embedding":
            planes = weight
        for name in plan.names:
            module = model.get_submodule(name)
            bias = module._parameters.get("bias")
            run = None if plan.linear is None else Seen(plan.linear.run)
            pack(module, "weight", replace(weight, bias=bias), run=run)
        mapped.drop(stored)
        if filling is not None:
            filling.source.release(
                n for n in (f"{name}.weight" for name in plan.names) if n in filling.source
            )
        kernels = {} if plan.linear is None else {"linear": plan.linear.name}
        size = 0 if plan.shares else weight.nbytes
        rows.append(OutsideReport(plan.names[0], plan.role, kernels, plan.format.name, size))
    return rows
