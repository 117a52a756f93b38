"""Decoding beside processes that use the processors, too: SmolLM2-135M in bfloat16, one sequence.

`step_ms` is the time of a decode step after a prompt of 8 tokens, and `beside_idle` its ratio to the same
model's step where nothing else runs. Each busy process is one endless loop. With as many of them as threads,
a fair share of the processors is half, a ratio of 2.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.request import Request
from benchmarks.sampling import subject
from slipstream.engine.open import resolve_place

__all__ = ["measure"]

_MODELS: dict[str, str | None] = {"slipstream bf16": "auto", "transformers eager bf16": None}
_NEW = {"slipstream bf16": 65, "transformers eager bf16": 5}
"""New tokens of a round: eager steps take up to seconds each."""


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each model and number of busy processes, none to as many as threads."""
    folder = resolve_place("demo")
    models = {name: subject(folder, quant) for name, quant in _MODELS.items()}
    rounds = 1 if request.quick else request.rounds or 5
    times: dict[tuple[str, int], list[float]] = {}
    for busy in range(torch.get_num_threads() + 1):
        with _busy(busy):
            for turn in range(rounds + 1):  # the first round warms up
                for name, model in models.items():
                    steps = times.setdefault((name, busy), [])
                    if turn:
                        steps.append(_step(model, _NEW[name]))
                    else:
                        _step(model, 2)
    medians = {key: statistics.median(steps) for key, steps in times.items()}
    rows = [
        {
            "model": name,
            "busy": busy,
            "step_ms": medians[name, busy],
            "step_ms_range": [min(steps), max(steps)],
            "beside_idle": medians[name, busy] / medians[name, 0],
            "repeat": rounds,
        }
        for (name, busy), steps in times.items()
    ]
    yield "crowded_cpu", {"rows": rows}


def _step(model: Any, new: int) -> float:
    """Return the milliseconds per new token, prompt included."""
    ids = torch.randint(1000, 40000, (1, 8), generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, do_sample=False
    )
    return (time.perf_counter() - start) / (made.shape[1] - ids.shape[1]) * 1e3


@contextmanager
def _busy(count: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
