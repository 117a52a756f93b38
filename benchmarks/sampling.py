"""The cost of sampling relative to greedy decoding: SmolLM2-135M, in the engine and in the original model.

`step_ms` is the time of a decode step, averaged over 33 new tokens after a prompt of 8, without the prefill
and the first token; `beside_greedy` is its ratio to the same model's greedy step. Measurements of rows
alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import slipstream
from benchmarks.request import Request
from slipstream.engine.open import open_model, resolve_place

__all__ = ["measure", "subject"]

_MODELS: dict[str, str | None] = {
    "transformers eager bf16": None,
    "slipstream bf16": "auto",
    "slipstream int4": "int4",
}
_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, penalty": {"do_sample": False, "repetition_penalty": 1.1},
    "temperature": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "top k 50": {"do_sample": True, "temperature": 0.8, "top_k": 50},
    "top p 0.9": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9},
    "top k 20, top p 0.8, penalty": {"do_sample": True, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
}
_PROMPT, _NEW = 8, 33


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each model, batch size and way to choose tokens."""
    folder = resolve_place("demo")
    models = {name: subject(folder, quant) for name, quant in _MODELS.items()}
    rounds, new = (1, 4) if request.quick else (request.rounds or 3, _NEW)
    rows = [row for batch in (1, 8) for row in _rows(models, batch, rounds, new)]
    yield "sampling", {"rows": rows}


def subject(folder: str, quant: str | None) -> Any:
    """Return a checkpoint's original model in bfloat16, or with `quant` its engine in these weights."""
    model = open_model(folder, torch.bfloat16)
    if quant is None:
        return model
    return slipstream.init_inference(
        model, dtype=torch.bfloat16, replace_with_kernel_inject=True, quant=quant
    )


def _rows(models: dict[str, Any], batch: int, rounds: int, new: int) -> list[dict[str, Any]]:
    ids = torch.randint(1000, 40000, (batch, _PROMPT), generator=torch.Generator().manual_seed(1))
    times: dict[tuple[str, str], list[float]] = {(m, way): [] for m in models for way in _WAYS}
    for _ in range(rounds + 1):  # the first round warms up
        for (name, way), steps in times.items():
            torch.manual_seed(1)
            first_token = _seconds(models[name], ids, _WAYS[way], 1)
            steps.append((_seconds(models[name], ids, _WAYS[way], new) - first_token) / (new - 1) * 1e3)
    medians = {key: statistics.median(steps[1:]) for key, steps in times.items()}
    return [
        {
            "model": name,
            "batch": batch,
            "way": way,
            "step_ms": medians[name, way],
            "step_ms_range": [min(steps[1:]), max(steps[1:])],
            "beside_greedy": medians[name, way] / medians[name, "greedy"],
            "repeat": rounds,
        }
        for (name, way), steps in times.items()
    ]


def _seconds(model: Any, ids: Tensor, options: dict[str, Any], new: int) -> float:
    start = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return time.perf_counter() - start
