"""Decoding with proposed tokens relative to decoding without: SmolLM2-135M, which copies a text.

`tokens_per_s` counts the tokens after the first, without the prefill; `beside_greedy` is its ratio to the
same model's greedy decoding, `beside_transformers` to the original model's greedy decoding. Measurements of
rows alternate. The assistant is an int4 engine of the same weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.request import Request
from benchmarks.sampling import subject
from slipstream.engine.open import resolve_place

__all__ = ["measure"]

_MODELS: dict[str, str | None] = {
    "transformers eager bf16": None,
    "slipstream bf16": "auto",
    "slipstream int8": "int8",
    "slipstream int4": "int4",
}
_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "lookup of 5": {"prompt_lookup_num_tokens": 5},
    "lookup of 10": {"prompt_lookup_num_tokens": 10},
    "int4 assistant": {"assistant_model": "slipstream int4"},
}
_TEXT = (
    "Anna said that the pump in building four must be replaced before the winter, because the old one leaks. "
    "Peter answered that the new pump costs 4200 euros and takes three weeks to arrive. The board agreed to "
    "order it on Monday, and to ask the plumber, Mr. Lindgren, for a quote."
)
_MOST, _DRAFT = 96, 5


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each model and way to propose tokens."""
    from transformers import AutoTokenizer

    folder = resolve_place("demo")
    asked = f"The minutes:\n\n{_TEXT}\n\nA copy of the minutes:\n\nAnna said"
    prompt = dict(AutoTokenizer.from_pretrained(folder)(asked, return_tensors="pt"))
    models = {name: subject(folder, quant) for name, quant in _MODELS.items()}
    models["slipstream int4"].generation_config.num_assistant_tokens = _DRAFT
    rounds, most = (1, 4) if request.quick else (request.rounds or 5, _MOST)
    yield "assisted", {"rows": _rows(models, prompt, rounds, most)}


def _rows(models: dict[str, Any], prompt: dict[str, Any], rounds: int, most: int) -> list[dict[str, Any]]:
    ways = {
        (name, way): {key: models.get(value, value) for key, value in options.items()}
        for name in models
        for way, options in _WAYS.items()
        if options.get("assistant_model") not in (name, "slipstream int4" if name.startswith("t") else "")
    }
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in ways}
    counts: dict[tuple[str, str], int] = {}
    for _ in range(rounds + 1):  # the first round warms up
        for key, options in ways.items():
            model = models[key[0]]
            first, _ = _run(model, prompt, options, 1)
            seconds, counts[key] = _run(model, prompt, options, most)
            rates[key].append((counts[key] - 1) / (seconds - first))
    medians = {key: statistics.median(found[1:]) for key, found in rates.items()}
    return [
        {
            "model": name,
            "way": way,
            "tokens": counts[name, way],
            "tokens_per_s": medians[name, way],
            "tokens_per_s_range": [min(found[1:]), max(found[1:])],
            "beside_greedy": medians[name, way] / medians[name, "greedy"],
            "beside_transformers": medians[name, way] / medians["transformers eager bf16", "greedy"],
            "repeat": rounds,
        }
        for (name, way), found in rates.items()
    ]


def _run(model: Any, prompt: dict[str, Any], options: dict[str, Any], most: int) -> tuple[float, int]:
    """Return the seconds of a call, and the number of new tokens."""
    start = time.perf_counter()
    out = model.generate(**prompt, **options, max_new_tokens=most, do_sample=False, pad_token_id=0)
    return time.perf_counter() - start, out.shape[1] - prompt["input_ids"].shape[1]
