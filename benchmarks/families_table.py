"""The tables of `results/families_cpu.json` and its neighbours for results/README.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.families_cpu import DTYPES, file_name

__all__ = ["render", "section"]

_RESULTS = Path(__file__).parent / "results"


def section(folder: Path = _RESULTS) -> str:
    """Render the results of every dtype that a folder has, as Markdown."""
    paths = [folder / f"{file_name(dtype)}.json" for dtype in DTYPES]
    parts = [render(json.loads(path.read_text())) for path in paths if path.exists()]
    return "\n".join(parts) or "No results are committed yet.\n"


def render(result: Mapping[str, Any]) -> str:
    """Render a table for each kind of model: a row for each model, a column for each task."""
    where = f"{result['device']}, {result['threads']} threads"
    versions = f"torch {result['torch']}, transformers {result['transformers']}"
    parts = [f"In {result['dtype']}: {where}, {versions}, {result['rounds']} rounds.\n"]
    kinds = dict.fromkeys(row["kind"] for row in result["rows"])
    parts += [_table(kind, [row for row in result["rows"] if row["kind"] == kind]) for kind in kinds]
    return "\n".join(parts)


def _table(kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = [f"| {kind} | level | {' | '.join(tasks)} |", "|---|---|" + "---:|" * len(tasks)]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {row["task"]: row for row in rows if row["model"] == model}
        cells = [_cell(own[task]) if task in own else "" for task in tasks]
        level = next(iter(own.values())).get("level", "-")
        lines.append(f"| {model} | {level} | {' | '.join(cells)} |")
    medians = [_median([row for row in rows if row["task"] == task]) for task in tasks]
    return "\n".join([*lines, f"| median | | {' | '.join(medians)} |"]) + "\n"


def _cell(row: Mapping[str, Any]) -> str:
    if why := row.get("error") or row.get("differs"):
        return str(why).replace("|", "/")
    low, high = row["times_original_range"]
    return f"{row['times_original']:.2f}x ({low:.2f} - {high:.2f}), {row['engine_ms']:.1f} ms"


def _median(rows: Sequence[Mapping[str, Any]]) -> str:
    ratios = [row["times_original"] for row in rows if "times_original" in row]
    return f"{statistics.median(ratios):.2f}x" if ratios else ""
