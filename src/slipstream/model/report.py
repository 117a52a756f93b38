"""Reports what was fused, what was not, and why: as a table for people and a dictionary for programs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

__all__ = ["LayerReport", "OutsideReport", "Report", "SplitReport"]


@dataclass(frozen=True)
class LayerReport:
    """Report on one layer.

    Attributes:
        name: Its path in the model.
        family: The family that supports it, or None.
        level: "block", "module" or "none".
        kernels: Implementation by op; empty where nothing is bound.
        format: Weight format, or the dtype's name for dense weights.
        bytes: Size of its weights in bytes.
        max_error: Largest absolute error of the self-check; None where it did not run.
        reason: Why the level is not higher; at level "block", which part still runs its own code, if any.
        parts: Kind of each swapped module ("norm", "linear", "gated feed-forward", "attention") by its path
            from the layer; only at level "module".
        refused: Why a module of one of these kinds runs its own code, by its path.
    """

    name: str
    family: str | None
    level: str
    kernels: Mapping[str, str]
    format: str
    bytes: int
    max_error: float | None
    reason: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OutsideReport:
    """Report on one packed matrix outside the layers.

    Attributes:
        name: Its path in the model.
        role: "head" or "embedding".
        kernels: Implementation by op; empty for an embedding.
        format: Weight format.
        bytes: Size of its planes in bytes; 0 where it shares those of the embedding.
    """

    name: str
    role: str
    kernels: Mapping[str, str]
    format: str
    bytes: int

    def __str__(self) -> str:
        """Return one line of text."""
        size = _size(self.bytes) if self.bytes else "shared with the embedding"
        run = f", {_kernels(self.kernels)}" if self.kernels else ""
        return f"{self.role} {self.name}: {self.format}, {size}{run}"


@dataclass(frozen=True)
class SplitReport:
    """Report on one matrix of a layer that runs its own code on several ranks.

    Attributes:
        name: Its path, relative to its layer, or to the model in an engine's report.
        how: Which part of it a rank holds.
        source: Origin of the decision: "injection_policy", "transformers' plan", "structure" (a run of the
            layer shows it), "any linear", or empty where the matrix is whole.
        reason: Why it is not cut as part of a branch.
    """

    name: str
    how: str
    source: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """Report on a whole engine (or, from `inspect`, on the engine that would be built).

    Attributes:
        level: "block" where every layer is fused, "module" where any part is, else "none".
        device: Device of the engine.
        notes: What a user should know: settings without effect here, fallbacks and their reasons.
        layers: The layers in the order of the model.
        times: Milliseconds per call by layer name, where profiling is on.
        outside: The packed matrices outside the layers.
        split: Which parts of the matrices of layers that run their own code a rank holds.
    """

    level: str
    device: str
    notes: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    times: Mapping[str, float] = field(default_factory=dict)
    outside: tuple[OutsideReport, ...] = ()
    split: tuple[SplitReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; `outside`, `split`, `parts` and `refused` are present only if not empty."""
        keys = ("name", "family", "level", "kernels", "format", "bytes", "max_error")
        layers = [{key: getattr(layer, key) for key in keys} for layer in self.layers]
        for layer in layers:
            layer["kernels"] = dict(layer["kernels"])
        for row, layer in zip(self.layers, layers, strict=True):
            layer |= {key: dict(getattr(row, key)) for key in ("parts", "refused") if getattr(row, key)}
        data = {"level": self.level, "device": self.device, "notes": list(self.notes), "layers": layers}
        outside = [{**asdict(part), "kernels": dict(part.kernels)} for part in self.outside]
        split = [asdict(part) for part in self.split]
        return data | ({"outside": outside} if outside else {}) | ({"split": split} if split else {})

    def with_stack(self, names: Mapping[str, str]) -> Report:
        """Return a copy with the implementation that runs consecutive layers together, by layer name."""
        layers = (
            replace(one, kernels={**one.kernels, "stack": names[one.name]}) if one.name in names else one
            for one in self.layers
        )
        return replace(self, layers=tuple(layers))

    def __str__(self) -> str:
        """Return a table; consecutive layers that differ only in their index share a line."""
        size = sum(layer.bytes for layer in self.layers)
        lines = [
            f"level {self.level} on {self.device}, {len(self.layers)} layers, {_size(size)} of layer weights"
        ]
        rows: list[tuple[str, ...]] = [
            ("layers", "level", "family", "format", "size", "max error", "kernels")
        ]
        if self.times:
            rows[0] = (*rows[0], "ms")
        rows.extend(self._row(list(group)) for _, group in groupby(self.layers, key=_kind))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        if self.layers:
            lines.extend("  " + _aligned(row, widths) for row in rows)
        lines += [f"  {part}" for part in self.outside]
        lines += [f"  {line}" for line in _split_lines(self.split)]
        lines += [f"  {line}" for line in _part_lines(self.layers)]
        reasons = {layer.reason: layer.name for layer in reversed(self.layers) if layer.reason}
        lines += [f"  {name}: {reason}" for reason, name in reversed(reasons.items())]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _row(self, group: list[LayerReport]) -> tuple[str, ...]:
        first, last = group[0], group[-1]
        name = first.name if len(group) == 1 else f"{first.name} .. {last.name.rpartition('.')[2]}"
        errors = [layer.max_error for layer in group if layer.max_error is not None]
        row = (
            name,
            first.level,
            first.family or "-",
            first.format,
            _size(sum(layer.bytes for layer in group)),
            f"{max(errors):.1e}" if errors else "-",
            _kernels(first.kernels),
        )
        if self.times:
            return (*row, f"{sum(self.times.get(layer.name, 0.0) for layer in group):.3f}")
        return row


def _part_lines(layers: tuple[LayerReport, ...]) -> list[str]:
    """List what was swapped inside layers, and what was not and why; identical layers share lines."""
    seen: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], str] = {}
    for layer in layers:
        kinds = tuple(sorted(layer.parts.values()))
        if kinds or layer.refused:
            seen.setdefault((kinds, tuple(layer.refused.items())), layer.name)
    lines = []
    for (kinds, refused), name in seen.items():
        counts = ", ".join(f"{kinds.count(kind)} {_several(kind, kinds)}" for kind in dict.fromkeys(kinds))
        lines += [f"{name}: {counts} run by the bound ops"] if kinds else []
        lines += [f"{name}.{path}".rstrip(".") + f" runs its own code: {why}" for path, why in refused]
    return lines


def _several(kind: str, kinds: tuple[str, ...]) -> str:
    return kind if kinds.count(kind) == 1 else f"{kind}s"


def _split_lines(rows: tuple[SplitReport, ...]) -> list[str]:
    """Return a line for each matrix; matrices of identical layers share one."""
    seen: dict[tuple[str, ...], None] = {}
    for row in rows:
        source = f" ({row.source})" if row.source else ""
        seen[(re.sub(r"\.\d+(?=\.)", ".*", row.name), f"{row.how}{source}", row.reason)] = None
    return [f"{name}: {how}{f'; {reason}' if reason else ''}" for name, how, reason in seen]


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _kind(layer: LayerReport) -> tuple[Any, ...]:
    stem = layer.name.rpartition(".")[0]
    return stem, layer.family, layer.level, tuple(layer.kernels.items()), layer.format, layer.reason


def _kernels(kernels: Mapping[str, str]) -> str:
    if not kernels:
        return "-"
    by_name: dict[str, list[str]] = {}
    for op, name in kernels.items():
        by_name.setdefault(name, []).append(op)
    if len(by_name) == 1:
        return f"{next(iter(by_name))} ({len(kernels)} ops)"
    return "; ".join(f"{name}: {', '.join(ops)}" for name, ops in by_name.items())


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
