"""Draws the results as a chart: `env/chart/bin/python -m benchmarks.peers.chart`, after `install chart`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.peers.document import RESULTS, best_peer, read

_PANELS = (
    ("smollm2", ("decode_1", "decode_8", "prefill_512")),
    ("llama-1b", ("decode_1", "decode_8", "prefill_512")),
)
_TITLES = {"decode_1": "decode, batch 1", "decode_8": "decode, batch 8", "prefill_512": "prefill, 512 tokens"}
_PRECISIONS = {"bfloat16": "bf16", "int8": "int8", "int4": "int4"}
_ROWS = {  # by kind, usually the start of a row's name: the label and the colour of a bar
    "slipstream": ("Slipstream", "#0b6e8a"),
    "also slipstream": ("Slipstream, with bf13 or int8 activations", "#6fb3c5"),
    "OpenVINO": ("OpenVINO", "#b8a9c9"),
    "llama.cpp": ("llama.cpp", "#e3b88f"),
    "transformers compiled": ("transformers, compiled", "#a9bfa4"),
    "transformers eager": ("transformers, eager bf16", "#c9c9c9"),
}
_ALSO = ("slipstream bf13", "slipstream int8, int8 activations", "slipstream int4, int8 activations")
_UNSHOWN = ("slipstream fp8", "slipstream fp6")
_INK, _MUTED = "#222222", "#777777"


def draw(path: Path) -> None:
    """Draw the chart and write it to `path`."""
    results = read()
    panels = [(model, tasks) for model, tasks in _PANELS if any(key[0] == model for key in results)]
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9, "text.color": _INK})
    figure, axes = plt.subplots(len(panels), 3, figsize=(13, 4.9 * len(panels)), squeeze=False)
    for row_axes, (model, tasks) in zip(axes, panels, strict=True):
        for axis, task in zip(row_axes, tasks, strict=True):
            found = {p: results[model, p] for p in _PRECISIONS if (model, p) in results}
            _panel(axis, found, task)
        title = next(result["model"] for key, result in results.items() if key[0] == model)
        row_axes[0].set_title(f"{title}   {_TITLES[tasks[0]]}", loc="left", fontweight="bold")
    any_result = next(iter(results.values()))
    kinds = {_kind(row["row"]) for result in results.values() for row in result["rows"]}
    shown = [row for kind, row in _ROWS.items() if kind in kinds]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in shown]
    labels = [label for label, _ in shown]
    figure.legend(handles, labels, loc="upper center", ncol=len(shown), frameon=False)
    figure.text(
        0.01,
        0.008,
        f"Tokens per second, more is better; medians, rows took turns. {any_result['device']},"
        f" {any_result['threads']} threads. Beside Slipstream: ratio to the best of the others, eager aside.",
        color=_MUTED,
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.02, 1, 0.965))
    figure.savefig(path, dpi=130)


def _kind(row: str) -> str | None:
    """Return the key of `_ROWS` under which a table's row is drawn; None if it is not."""
    if row in _UNSHOWN:
        return None
    return "also slipstream" if row in _ALSO else next((kind for kind in _ROWS if row.startswith(kind)), None)


def _panel(axis: Any, found: dict[str, dict[str, Any]], task: str) -> None:
    """Draw one task of one model: a group of bars for each precision, from the top down."""
    place, ticks = 0.0, []
    longest = max((row.get(task, 0) for result in found.values() for row in result["rows"]), default=1)
    for precision, result in found.items():
        start = place
        for kind, (_, colour) in _ROWS.items():
            row = next((r for r in result["rows"] if _kind(r["row"]) == kind), None)
            if row is None or task not in row:
                continue
            ours = "slipstream" in kind
            low, high = row[f"{task}_range"]
            axis.barh(place, row[task], color=colour, height=0.82)
            axis.plot([low, high], [place, place], color=_INK, linewidth=0.8, alpha=0.5)
            text = f"{row[task]:.0f}" if row[task] >= 100 else f"{row[task]:.1f}"
            peer = best_peer(result, task)
            if ours and peer:
                text += f"   {row[task] / peer[task]:.2f}x"
            axis.text(
                max(high, row[task]) + longest * 0.015,
                place,
                text,
                va="center",
                fontsize=8.5,
                fontweight="bold" if ours else "normal",
                color=_INK if ours else _MUTED,
            )
            place += 1
        ticks.append(((start + place - 1) / 2, _PRECISIONS[precision]))
        place += 0.7
    axis.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks], fontweight="bold")
    axis.invert_yaxis()
    axis.set_xlim(0, longest * 1.22)
    axis.set_title(_TITLES[task], loc="left")
    axis.tick_params(left=False, bottom=False, labelbottom=False)
    for side in axis.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS.parent / "peers.png")
