"""Measures one table: loads its rows, alternates between them, and computes medians, ranges and shares."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS, Facts, Model, facts
from benchmarks.peers.conductor import Failed, Worker, environments, not_installed
from benchmarks.peers.rows import TASKS, Row, Task, check_left_out, left_out, rows_of, tables
from benchmarks.request import Request

__all__ = ["Entry", "build_meter", "measure", "measure_table"]

Limits = dict[str, float | None]


class Entry:
    """A row while it is measured: its worker and its answers, or the reason why there are none."""

    def __init__(self, row: Row, *, leave_out: bool = False) -> None:
        """Create the entry without starting its worker."""
        self.row = row
        self.error = "left out" if leave_out else not_installed(row)
        self.loaded: dict[str, Any] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.peak_bytes: int | None = None
        self._worker: Worker | None = None

    def start(self, folder: Path, threads: int, stack: ExitStack) -> None:
        """Prepare the row's files in one process, and load in another, whose peak memory is the row's."""
        if self.error:
            return
        log = folder / "logs" / f"{self.row.name}.log"
        given = {"folder": str(folder), "precision": self.row.precision}
        try:
            if self.row.environment:
                with Worker(self.row, log) as preparing:
                    preparing.ask("prepare", **given)
            self._worker = stack.enter_context(Worker(self.row, log))
            self.loaded = self._worker.ask("load", **given, threads=threads, **self.row.options)
        except Failed as failed:
            self.error = str(failed)

    def measure(self, task: Task, model: Model, vocabulary: int, *, keep: bool) -> None:
        """Measure one figure; a row that fails is not measured again."""
        if self.error or self._worker is None:
            return
        given = {"vocabulary": vocabulary, "batch": task.batch, "tokens": task.tokens}
        try:
            if model.decodes:
                answer = self._worker.ask("generate", **given, new=model.new_tokens if task.decodes else 1)
            else:
                answer = self._worker.ask("encode", **given)
            if keep:
                self.answers.setdefault(task.name, []).append(answer)
        except Failed as failed:
            self.error = str(failed)

    def finish(self) -> None:
        """Read the worker's peak memory."""
        if not self.error and self._worker is not None:
            self.peak_bytes = self._worker.ask("peak")["bytes"]


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one results file for each model and precision.

    Raises:
        ValueError: A part of the request is unknown.
    """
    check_left_out(request.without)
    for name, precision in tables(request.only, quick=request.quick):
        yield f"peers/{name}-{precision}", measure_table(name, precision, request)


def measure_table(name: str, precision: str, request: Request) -> dict[str, Any]:
    """Measure one model at one precision.

    Args:
        name: A key of `MODELS`.
        precision: One of `PRECISIONS`.
        request: `rounds` is the number of rounds, or 0 for the model's default; `quick` leaves out rows that
            are compiled, and `without` those whose names begin so.

    Returns:
        `limits` (of the machine, by name), `rows`, and a description of the measurement.

    Raises:
        Failed: The model or the meter could not be made.
    """
    model, folder = MODELS[name], environments() / "models" / name
    counted = facts(_checkpoint(name, folder / "hf"))
    threads = len(os.sched_getaffinity(0))
    meter = build_meter()
    limits: list[Limits] = []
    entries = [
        Entry(row, leave_out=left_out(row, request.without))
        for row in rows_of(name, precision, quick=request.quick)
    ]
    with ExitStack() as stack:
        for entry in entries:
            entry.start(folder, threads, stack)
        for turn in range((request.rounds or model.rounds) + 1):
            # The first round warms up, compiles and fills caches.
            if turn and meter:
                limits.append(json.loads(_run([str(meter), str(threads)])))
            for task in TASKS[model.decodes]:
                for entry in entries[::-1] if turn % 2 else entries:
                    entry.measure(task, model, counted.vocabulary, keep=turn > 0)
        for entry in entries:
            entry.finish()
    best = _medians(limits)
    return {
        "model": model.title,
        "precision": precision,
        "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "threads": threads,
        "new_tokens": model.new_tokens,
        "rounds": request.rounds or model.rounds,
        "limits": best,
        "rows": [_flat(entry, entries, model, counted, best) for entry in entries],
    }


def _checkpoint(name: str, folder: Path) -> Path:
    """Return the model's checkpoint folder, which a separate process makes the first time."""
    if not folder.exists():
        partial = folder.with_name("partial")
        shutil.rmtree(partial, ignore_errors=True)
        _run([sys.executable, "-m", "benchmarks.models", name, str(partial)])
        partial.rename(folder)
    return folder


def build_meter() -> Path | None:
    """Build `roof.cpp` for this machine and return its path; None without a compiler."""
    compiler, source = shutil.which("c++"), Path(__file__).with_name("roof.cpp")
    if compiler is None:
        return None
    meter = environments() / "roof"
    if not meter.exists() or meter.stat().st_mtime < source.stat().st_mtime:
        meter.parent.mkdir(parents=True, exist_ok=True)
        options = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-pthread"]
        _run([compiler, *options, str(source), "-o", str(meter)])
    return meter


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {(done.stderr.splitlines() or ['no further word'])[-1]}")
    return done.stdout


def _medians(limits: list[Limits]) -> Limits:
    """Return the median of each limit over the rounds, in GB/s or TFLOP/s."""
    values = {key: [each[key] for each in limits] for key in (limits[0] if limits else ())}
    return {
        key: None if None in numbers else round(statistics.median(n for n in numbers if n), 3)
        for key, numbers in values.items()
    }


def _flat(entry: Entry, entries: list[Entry], model: Model, counted: Facts, limits: Limits) -> dict[str, Any]:
    """Return one row of the results as plain data."""
    row: dict[str, Any] = {"row": entry.row.name, **entry.loaded}
    if entry.error:
        return {**row, "error": entry.error}
    row["peak_bytes"] = entry.peak_bytes
    for task in TASKS[model.decodes]:
        answers = entry.answers[task.name]
        numbers = [_figure(task, answer) for answer in answers]
        row[task.name] = _rounded(statistics.median(numbers))
        row[f"{task.name}_range"] = [_rounded(min(numbers)), _rounded(max(numbers))]
        if share := _share(task, statistics.median(numbers), entry, model, counted, limits):
            row[f"{task.name}_share"] = round(share, 3)
    if model.decodes:
        firsts = [answer["first"] for answer in entry.answers["decode_1"]]
        row["first_token_128_s"] = _rounded(statistics.median(firsts))
        row["same_tokens"] = _same_tokens(entry, entries)
    return row


def _figure(task: Task, answer: dict[str, Any]) -> float:
    """Return the figure of a task, in its unit."""
    if task.unit == "ms":
        return float(answer["seconds"] * 1e3)
    if task.unit == "sequences/s":
        return float(task.batch / answer["seconds"])
    if task.decodes:
        return float(task.batch / answer["step"])
    return float(task.batch * task.tokens / answer["first"])


def _share(
    task: Task, figure: float, entry: Entry, model: Model, counted: Facts, limits: Limits
) -> float | None:
    """Return the share of the machine's limit: its read rate for decoding, else its units' peak rate."""
    if task.decodes:
        read, weights = limits.get("read"), entry.loaded.get("weight_bytes")
        if not read or not weights:
            return None
        width = 4 if entry.row.precision == "float32" else 2
        spared = statistics.median(a.get("spared_bytes", 0) for a in entry.answers[task.name])
        cache = task.batch * (task.tokens + model.new_tokens / 2) * counted.cache * width
        weights = weights * counted.decode_share(task.batch) - spared
        return (weights + cache) * figure / task.batch / (read * 1e9)
    units = limits.get(entry.row.units)
    if not units:
        return None
    seconds = {"ms": figure / 1e3, "sequences/s": task.batch / figure}.get(
        task.unit, task.batch * task.tokens / figure
    )
    return counted.flops(task.batch, task.tokens, causal=model.decodes) / seconds / (units * 1e12)


def _same_tokens(entry: Entry, entries: list[Entry]) -> int | None:
    """Count the tokens before this row first differs from transformers eager; None without an eager row."""
    eager = next(
        (e for e in entries if e.row.options.get("how") == "eager" and e.answers.get("decode_1")), None
    )
    if eager is None:
        return None
    mine, theirs = (each.answers["decode_1"][0]["tokens"] for each in (entry, eager))
    return next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))


def _rounded(value: float) -> float:
    """Round to four significant digits, the precision of a measurement."""
    return float(f"{value:.4g}")
