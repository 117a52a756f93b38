"""Renders the JSON results as tables: short ones for the README, complete ones for pages in `results/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FOLDERS", "RESULTS", "best_peer", "machines", "page", "read", "summary"]

RESULTS = Path(__file__).resolve().parents[1] / "results" / "peers"
_MACHINES = {
    "AMD Zen 5: AVX-512, 512 bits at once": RESULTS.parent / "zen5" / "peers",
    "AMD Zen 4: AVX-512, in two halves": RESULTS,
    "AMD Zen 3: AVX2, as most laptops": RESULTS.parent / "avx2" / "peers",
    "Intel Emerald Rapids: AMX (llama.cpp alone)": RESULTS.parent / "amx" / "peers",
}
FOLDERS = tuple(_MACHINES.values())
"""The folders of all machines; `RESULTS` is the one whose figures are in the README."""
_ORDER = ("smollm2", "llama-1b", "gpt2", "moe", "minilm")
_PRECISIONS = ("float32", "bfloat16", "int8", "int4")
_SHORT = {"smollm2": _PRECISIONS[1:], "llama-1b": _PRECISIONS[1:], "minilm": _PRECISIONS[:2]}
_HEADS = {
    "decode_1": "decode, batch 1 (tokens/s)",
    "decode_8": "decode, batch 8 (tokens/s)",
    "prefill_512": "prefill of 512 (tokens/s)",
    "encode_32x128": "32 x 128 tokens (sequences/s)",
    "encode_1x16": "1 x 16 tokens (ms)",
}
Result = dict[str, Any]


def read(folder: Path = RESULTS) -> dict[tuple[str, str], Result]:
    """Read the results by model and precision, in the order in which they are shown."""
    found = {}
    for model in _ORDER:
        for precision in _PRECISIONS:
            path = folder / f"{model}-{precision}.json"
            if path.exists():
                found[model, precision] = json.loads(path.read_text())
    return found


def best_peer(result: Result, task: str) -> Result | None:
    """Return the fastest row of another engine; transformers eager is the baseline and does not count."""
    others = [
        row
        for row in result["rows"]
        if task in row and not row["row"].startswith(("slipstream", "transformers eager"))
    ]
    return max(others, key=lambda row: _speed(task, row), default=None)


def summary(results: dict[tuple[str, str], Result]) -> str:
    """Render the README's tables: the engine's figures, and ratios to the best peer and to eager."""
    parts = []
    for models in (("smollm2", "llama-1b"), ("minilm",)):
        chosen = [
            (key, result) for key, result in results.items() if key[0] in models and key[1] in _SHORT[key[0]]
        ]
        if not chosen:
            continue
        tasks = _tasks([result for _, result in chosen])
        lines = [
            _line(["model", "weights", *(_HEADS[task] for task in tasks)]),
            _line(["---"] * (2 + len(tasks))),
        ]
        for _, result in chosen:
            ours = [row for row in result["rows"] if row["row"].startswith("slipstream") and tasks[0] in row]
            for row in ours:
                weights = row["row"].removeprefix("slipstream ")
                lines.append(
                    _line([result["model"], weights, *(_compared(result, row, task) for task in tasks)])
                )
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def machines() -> str:
    """Render the README's table of machines: the smallest and largest speedup over the best peer.

    The range is over all weight formats; each is compared with the fastest other engine in the same table.
    """
    columns = {
        "SmolLM2, 1 sequence": ("smollm2", "decode_1"),
        "8 sequences": ("smollm2", "decode_8"),
        "prompt of 512": ("smollm2", "prefill"),
        "llama 1.1B, all of these": ("llama-1b", ""),
        "MiniLM": ("minilm", ""),
    }
    lines = [_line(["two cores of", *columns, "all rows"]), _line(["---"] * (2 + len(columns)))]
    for machine, folder in _MACHINES.items():
        link = f"[results]({(folder / 'README.md').relative_to(RESULTS.parents[2]).as_posix()})"
        lines.append(_line([machine, *(_range(folder, *column) for column in columns.values()), link]))
    return "\n".join(lines) + "\n"


def _range(folder: Path, model: str, task: str) -> str:
    ratios = [
        _speed(key, row) / _speed(key, peer)
        for (name, _), result in read(folder).items()
        for key in _HEADS
        if name == model and key.startswith(task) and (peer := best_peer(result, key))
        for row in result["rows"]
        if row["row"].startswith("slipstream") and key in row
    ]
    return f"{min(ratios):.1f} to {max(ratios):.1f}x" if ratios else ""


def page(results: dict[tuple[str, str], Result]) -> str:
    """Render the complete page: all rows with ranges, shares, memory and versions."""
    parts = ["# The engine beside its peers\n\nMade from the JSON beside it by `scripts/generate_docs`.\n"]
    for (name, precision), result in results.items():
        tasks = _tasks([result])
        parts.append(f"## {result['model']}, {precision}\n\n{_about(name, precision, result)}\n")
        heads = ["row", *(_HEADS[task] for task in tasks), "first token of 128 (s)", "peak MB", "same tokens"]
        heads = heads if "decode_1" in tasks else [*heads[:-3], "peak MB"]
        lines = [_line(heads), _line(["---"] * len(heads))]
        lines += [_line([*_full(row, tasks)]) for row in result["rows"]]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _tasks(results: Sequence[Result]) -> list[str]:
    return [task for task in _HEADS if any(task in row for result in results for row in result["rows"])]


def _speed(task: str, row: Result) -> float:
    """Return a figure for which more is better."""
    return 1 / row[task] if task == "encode_1x16" else float(row[task])


def _compared(result: Result, row: Result, task: str) -> str:
    parts = [f"**{_number(row[task])}**"]
    if peer := best_peer(result, task):
        parts.append(f"{_speed(task, row) / _speed(task, peer):.2f}x {peer['row']}")
    eager = next((r for r in result["rows"] if r["row"].startswith("transformers eager") and task in r), None)
    if eager:
        parts.append(f"{_speed(task, row) / _speed(task, eager):.1f}x eager")
    return ", ".join(parts)


def _about(name: str, precision: str, result: Result) -> str:
    limits = ", ".join(
        f"{key} {value:g} {'GB/s' if key == 'read' else 'TFLOP/s' if key != 'int8' else 'TOP/s'}"
        for key, value in result["limits"].items()
        if value
    )
    when = result["measured"] + (f", {result['rounds']} rounds" if "rounds" in result else "")
    versions = dict.fromkeys(row["version"] for row in result["rows"] if "version" in row)
    return (
        f"{result['device']}, {result['threads']} threads, {when}; measured limits: {limits}.\n"
        f"{'; '.join(versions)}. JSON: [{name}-{precision}.json]({name}-{precision}.json)"
    )


def _full(row: Result, tasks: Sequence[str]) -> Iterator[str]:
    yield row["row"]
    if "error" in row:
        yield row["error"].replace("|", "/")
        return
    for task in tasks:
        if task not in row:
            yield ""
            continue
        low, high = row[f"{task}_range"]
        share = row.get(f"{task}_share")
        yield f"{_number(row[task])} ({_number(low)} - {_number(high)})" + (f", {share:.0%}" if share else "")
    if "decode_1" in tasks:
        yield f"{row['first_token_128_s']:.3f}"
    yield f"{row['peak_bytes'] / 1e6:.0f}"
    if "decode_1" in tasks:
        yield "" if row["same_tokens"] is None else str(row["same_tokens"])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
