"""Many rows times a matrix on the CPU: bfloat16, int8 weights, int8 on both sides; and torch (oneDNN).

Measurements alternate in one process; figures are medians over the rounds. The share is of the peak rate of
the machine's arithmetic units on registers (`peers/roof.cpp`), measured in every eighth round, for the dtype
in which the products are computed: bfloat16 for int8 weights unless inputs are rounded too.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.peers.measure import build_meter
from benchmarks.request import Request
from slipstream.formats import FORMATS, Format, rounding_inputs
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.kernels.cpu.linear import native_linear

__all__ = ["measure"]

SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632), (1536, 576))
"""Outputs and inputs of the matrices of two models, with 1.1 billion and 135 million parameters."""
ROWS = (16, 64, 128, 512)

OURS: dict[str, tuple[Format, str]] = {
    "bfloat16": (FORMATS["plain"], "bfloat16"),
    "int8": (FORMATS["int8"], "bfloat16"),
    "int8, inputs too": (rounding_inputs(FORMATS["int8"]), "int8"),
    "int4, inputs too": (rounding_inputs(FORMATS["int4"]), "int8"),
}
"""Format, and dtype of the arithmetic unit, by the name of a row."""

Turn = Callable[[], object]


def turns(outputs: int, inputs: int, rows: int, library: Library) -> dict[str, tuple[Turn, str]]:
    """Return what is measured by name: a function to run, and the dtype of its arithmetic unit."""
    generator = torch.Generator().manual_seed(0)
    dense = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(torch.bfloat16)
    x = torch.randn(rows, inputs, generator=generator).to(torch.bfloat16)

    def ours(packed: Format) -> Turn:
        weight = packed.weight(dense, None)
        return lambda: native_linear(x, weight, library)

    runs: dict[str, tuple[Turn, str]] = {name: (ours(f), unit) for name, (f, unit) in OURS.items()}
    runs["torch bfloat16"] = lambda: F.linear(x, dense), "bfloat16"
    if rows > 16:  # torch refuses fewer; unlike ours, this does not include rounding and scaling
        codes, columns = (t.float().mul(30).clamp(-127, 127).to(torch.int8) for t in (x, dense))
        runs["torch int8, codes alone"] = lambda: torch._int_mm(codes, columns.t()), "int8"
    return runs


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each shape, number of rows and implementation."""
    isa = next((isa for isa in ISAS if refuse(isa) is None), None)
    library = None if isa is None else load(isa)
    if library is None:
        raise ValueError("matmul_cpu measures the native library, and there is none")
    rounds = 1 if request.quick else request.rounds or 15
    rows = []
    for shape in SHAPES[-1:] if request.quick else SHAPES:
        for count in ROWS[:2] if request.quick else ROWS:
            rows += _rows(*shape, count, library, rounds)
    yield "matmul_cpu", {"isa": isa, "rows": rows}


def _rows(outputs: int, inputs: int, count: int, library: Library, rounds: int) -> list[dict[str, Any]]:
    runs = turns(outputs, inputs, count, library)
    times: dict[str, list[float]] = {name: [] for name in runs}
    limits = []
    with torch.inference_mode():
        for run, _ in runs.values():
            run()
        for turn in range(rounds):
            if turn % 8 == 0:
                limits.append(_limits())
            for name, (run, _) in runs.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    result = []
    for name, (_, unit) in runs.items():
        median = statistics.median(times[name])
        rate = 2 * outputs * inputs * count / median / 1e12
        limit = statistics.median(each.get(unit) or 0.0 for each in limits)
        result.append(
            {
                "run": name,
                "outputs": outputs,
                "inputs": inputs,
                "rows": count,
                "us": round(median * 1e6, 1),
                "us_range": [round(min(times[name]) * 1e6, 1), round(max(times[name]) * 1e6, 1)],
                "tera_per_second": round(rate, 3),
                "share_of_unit": round(rate / limit, 3) if limit else None,
                "times_torch_bfloat16": round(statistics.median(times["torch bfloat16"]) / median, 2),
            }
        )
    return result


def _limits() -> dict[str, float]:
    """Return the TFLOP/s or TOP/s of each arithmetic unit on registers; empty without a compiler."""
    meter = build_meter()
    if meter is None:
        return {}
    command = [str(meter), str(torch.get_num_threads())]
    limits: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return limits
