"""The engine and the original model in turns, for models of many types with random weights, on the CPU.

Each row is one call of one model (`families_subjects`). Before it is timed, the engine's answer is compared
with the original's (`families_answers`); a row whose answers differ says what differs, and has no times. A
short call is repeated within a turn. The original is as transformers makes it: eager, with its default
attention and cache.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers

import slipstream
from benchmarks.families_answers import Call, compare
from benchmarks.families_subjects import SUBJECTS, TASKS, TINY, Subject, Task, inputs_of, like, make
from benchmarks.request import Request
from slipstream.model.selfcheck.check import MODEL_ERRORS

__all__ = ["DTYPES", "PARTS", "file_name", "measure"]

PARTS = (*SUBJECTS, *TINY)
"""The values that `--only` accepts."""
DTYPES = ("bfloat16", "float32")
"""The values that `--dtype` accepts; the first is the default."""

_ROUNDS = 5
_TURN = 0.05
"""Seconds that a turn takes at least: threads of the model before it may still spin when it starts."""


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each task of each subject."""
    dtype = request.dtype or DTYPES[0]
    names = request.only or tuple(TINY if request.quick else SUBJECTS)
    rounds = request.rounds or (1 if request.quick else _ROUNDS)
    rows = []
    with _quiet():
        for name in dict.fromkeys(names):
            for row in _rows({**SUBJECTS, **TINY}[name], getattr(torch, dtype), rounds):
                rows.append({"model": name, **row})
                print(_line(rows[-1]), flush=True)
            gc.collect()
    yield file_name(dtype), {"dtype": dtype, "rounds": rounds, "rows": rows}


def file_name(dtype: str) -> str:
    """Return the name of a dtype's results, without a suffix for the default."""
    return "families_cpu" if dtype == DTYPES[0] else f"families_cpu_{dtype}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers: it warns about special tokens outside small vocabularies, and shows progress."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _rows(subject: Subject, dtype: torch.dtype, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a subject's rows; what fails is a row that says so, and the others still run."""
    facts: dict[str, Any] = {"kind": subject.kind}
    try:
        original = make(subject, dtype)
        engine = slipstream.init_inference(
            like(original, dtype), dtype=dtype, replace_with_kernel_inject=True
        )
        exact = original if dtype == torch.float32 else like(original, torch.float32)
    except (slipstream.SlipstreamError, *MODEL_ERRORS) as error:
        yield {**facts, "task": "-", "error": _words(error)}
        return
    facts |= {"parameters": sum(p.numel() for p in original.parameters()), "level": engine.report().level}
    for task in TASKS[subject.kind]:
        try:
            call = _call(subject, task, original.config).to(dtype)
            yield {
                **facts,
                "task": task.name,
                **_row({"original": original, "engine": engine}, exact, call, rounds),
            }
        except (slipstream.SlipstreamError, *MODEL_ERRORS) as error:
            yield {**facts, "task": task.name, "error": _words(error)}
    engine.destroy()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _call(subject: Subject, task: Task, config: Any) -> Call:
    options = {
        "max_new_tokens": task.new_tokens,
        "do_sample": False,
        "num_beams": task.beams,
        "pad_token_id": 0,
    }
    return Call(inputs_of(subject, task, config), options if task.new_tokens else {})


def _row(models: Mapping[str, Any], exact: Any, call: Call, rounds: int) -> dict[str, Any]:
    """Compare the models' answers, and time them if they do not differ."""
    compared = compare(models["original"], models["engine"], exact, call)
    if compared.differs:
        return {"differs": compared.differs}
    times = _in_turns(models, call, rounds)
    ratios = [first / second for first, second in zip(times["original"], times["engine"], strict=True)]
    row: dict[str, Any] = {}
    for name, taken in times.items():
        row |= {f"{name}_ms": statistics.median(taken), f"{name}_ms_range": [min(taken), max(taken)]}
    return {
        **row,
        "times_original": row["original_ms"] / row["engine_ms"],
        "times_original_range": [min(ratios), max(ratios)],
        "off": compared.off,
        "original_off": compared.original_off,
    }


def _in_turns(models: Mapping[str, Any], call: Call, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds that one call of each model took in each round, after calls that warm up."""
    repeats = {name: max(1, math.ceil(_TURN / _seconds(model, call, 1))) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(_seconds(model, call, repeats[name]) * 1e3)
    return times


def _seconds(model: Any, call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call(model)
    return (time.perf_counter() - start) / repeats


def _line(row: Mapping[str, Any]) -> str:
    """Return what is said of a row while others are still measured."""
    said = row.get("error") or row.get("differs")
    said = said or f"{row['original_ms']:.4g} -> {row['engine_ms']:.4g} ms, {row['times_original']:.2f}x"
    return f"{row['model']} {row['task']}: {said}"
