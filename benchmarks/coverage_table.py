"""The tables of `results/coverage.json` for docs/coverage.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["render", "summary"]

_HEAD = (
    "| type | as | level | layers fused | largest error | greedy tokens | speed | what keeps the others |\n"
    "|---|---|---|---:|---:|---|---:|---|\n"
)


def render(results: Mapping[str, Any]) -> str:
    """Render one row for each type of model, as Markdown."""
    return _HEAD + "".join(_row(row) for row in results["rows"])


def summary(results: Mapping[str, Any]) -> str:
    """Count the types at each level, by the kind of model (`as`) that they were built as."""
    kinds = sorted({row["as"] for row in results["rows"]})
    lines = ["| as | types | block | module | none | not compared |", "|---|---:|---:|---:|---:|---:|"]
    for kind in kinds:
        levels = Counter(row["level"] for row in results["rows"] if row["as"] == kind)
        cells = [sum(levels.values()), *(levels[level] for level in ("block", "module", "none", "-"))]
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    where = f"transformers {results['transformers']}, torch {results['torch']}"
    return "\n".join(lines) + f"\n\nMeasured with {where}, in float32.\n"


def _row(row: Mapping[str, Any]) -> str:
    compared = row["level"] != "-"
    error = f"{row['error']:.1e}" if compared else ""
    fused = f"{row['fused']} of {row['layers']}" if compared else ""
    cells: Sequence[str] = (
        row["type"], row["as"], row["level"], fused, error, row["tokens"] if compared else "",
        f"{row['speed']:.2f}x" if row.get("speed") else "", row["why"]
    )  # fmt: skip
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"
