"""Builds an engine's report: a row for each layer, and notes on requested settings that had no effect."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from slipstream.devices import Device
from slipstream.formats import Format
from slipstream.model.block.block import Block
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.layers import Found
from slipstream.model.parts.parts import Part
from slipstream.model.report import LayerReport, Report
from slipstream.model.weights.packed import packed_bytes

__all__ = ["left_plain", "nothing_packed", "nothing_replaced", "summary"]

_NO_LAYERS = "has no layers that repeat (in an nn.ModuleList, or an nn.Sequential of one class with linears)"

_MUCH = 0.1
"""The report mentions weights that stay plain if their share exceeds this."""


def nothing_replaced(model: nn.Module, layers: Sequence[Found]) -> str:
    """Return the message for a user who requested kernel injection and gets none."""
    seen = sorted({type(found.layer).__name__ for found in layers})
    name = type(model).__name__
    what = f"the layers of {name} are {', '.join(seen)}" if seen else f"{name} {_NO_LAYERS}"
    return (
        f"replace_with_kernel_inject=True replaced nothing: {what}, without a known family or a known part; "
        "the model runs its own code. engine.report() has the reason for each layer"
    )


def nothing_packed(model: nn.Module, asked: Format) -> str:
    """Return the message for a user who requested packed weights and gets none."""
    return (
        f"{asked.name} weights were requested, but nothing was packed: {type(model).__name__} {_NO_LAYERS}, "
        "or none with an nn.Linear or Conv1D whose forward is the library's own"
    )


def left_plain(layers: Sequence[Found], verdicts: Mapping[str, Verdict], settings: Settings) -> list[str]:
    """Return a note if much of the weights of layers that run their own code is not packed as requested.

    There is none if the user chose by name what stays plain.
    """
    if not settings.format.bits or settings.plain_roles:
        return []
    plain: dict[str, int] = {}
    whole = 0
    for found in layers:
        if verdicts[found.name].returns is not None:
            continue
        for name, parameter in found.layer.named_parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                whole += parameter.numel()
                if not parameter.is_meta:
                    plain[name] = plain.get(name, 0) + parameter.numel()
    share = sum(plain.values()) / max(whole, 1)
    if share <= _MUCH:
        return []
    names = ", ".join(sorted(plain, key=lambda name: -plain[name])[:3])
    return [
        f"{share:.0%} of the weights of layers that run their own code stay plain ({names}): experts of "
        "unknown families or stacked in two dimensions, convolutions, and linears with an overridden forward"
    ]


def summary(
    device: Device,
    notes: Sequence[str],
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    blocks: Mapping[str, Block],
    parts: Mapping[str, Part],
    settings: Settings,
    packed: Mapping[str, str],
) -> Report:
    """Return an engine's report: a row for each layer, with its level, kernels, format, bytes and reason."""
    rows = []
    dense = str(settings.dtype).removeprefix("torch.")
    for found in layers:
        verdict, block, part = verdicts[found.name], blocks.get(found.name), parts.get(found.name)
        fused = verdict.returns is not None
        level = "block" if fused else "module" if part is not None and part.kinds else "none"
        kernels = {} if part is None else dict(part.kernels)
        kernels |= {"linear": packed[found.name]} if found.name in packed else {}
        kernels = kernels if block is None else block.ops.names()
        size = packed_bytes(found.layer) if block is None else block.weights.nbytes + _beside(found)
        error = verdict.max_error if level != "module" or part is None else part.max_error
        family = None if found.family is None else found.family.name
        holds = settings.format.bits and (block is not None or found.name in packed)
        name = settings.format.name if holds else dense
        rows.append(
            LayerReport(
                found.name,
                family,
                level,
                kernels,
                name,
                size,
                error,
                verdict.reason or found.note,
                {} if part is None else part.kinds,
                {} if part is None else part.refused,
            )
        )
    levels = {row.level for row in rows}
    level = "block" if levels == {"block"} else "none" if levels <= {"none"} else "module"
    return Report(level, str(device.torch_device), tuple(notes), tuple(rows))


def _beside(found: Found) -> int:
    """Return the bytes of a fused layer's parts that are not in its block, such as a state space.

    A part may be None: a layer that reads another's choice of keys has no indexer of its own.
    """
    own = () if found.family is None or found.spec is None else found.family.own_parts(found.spec)
    parts = [part for path in own if (part := operator.attrgetter(path)(found.layer)) is not None]
    return sum(part.nbytes if isinstance(part, Tensor) else packed_bytes(part) for part in parts)
