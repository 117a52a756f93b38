"""One native linear on the CPU: each weight format with few rows, compared with the memory's read rate.

Weights are cold: each pass goes through copies of a matrix that together exceed the caches. Passes of all
rows alternate in one process; figures are medians over the passes. `--only int8` measures one format.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.decode_cpu import read_rate
from benchmarks.request import Request
from slipstream.formats import FORMATS, VARIANTS
from slipstream.kernels.cpu.abi import DTYPES, LinearCall
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.linear import Weight

SHAPES = ((5632, 2048), (2048, 5632), (2048, 2048), (576, 1536), (1536, 576), (576, 576), (49152, 576))
ROWS = (*range(1, 18), 20, 24, 28, 32)
"""All batch sizes that a server may run: none should cost more than the next larger one."""
MEASURED = ("plain", "bf13", "int8", "int4", "fp8", "fp6")
PARTS = tuple(FORMATS | VARIANTS)
"""The values that `--only` accepts."""
COLD_BYTES = 192 << 20

Pass = Callable[[], None]


def copies_of(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> list[Weight]:
    """Return equal weights, each in its own memory, of at least `COLD_BYTES` together."""
    dense = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    one = (FORMATS | VARIANTS)[name].weight(dense, None)
    return [one.apply(torch.clone) for _ in range(max(2, -(-COLD_BYTES // one.nbytes)))]


def passes(weights: list[Weight], rows: int, dtype: torch.dtype, library: Library) -> Pass:
    """Return a function that multiplies with each of the weights, as the engine calls the library."""
    outputs, inputs = weights[0].shape
    x, out = torch.randn(rows, inputs).to(dtype), torch.empty(rows, outputs, dtype=dtype)
    calls, matrices = [], []
    for weight in weights:
        matrix = matrix_of(weight)
        assert not isinstance(matrix, str)
        matrices.append(matrix)
        calls.append(
            LinearCall(x=x.data_ptr(), out=out.data_ptr(), rows=rows, dtype=DTYPES[dtype], weight=matrix)
        )

    def run(keep: tuple[object, ...] = (x, out, matrices)) -> None:
        for call in calls:
            library.run("linear", call)

    return run


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each shape, format and number of rows, in bfloat16 (the first in float32 too)."""
    isa = next((isa for isa in ISAS if refuse(isa) is None), None)
    library = None if isa is None else load(isa)
    if library is None:
        raise ValueError("linear_cpu measures the native library, and there is none")
    names, rounds = request.only or MEASURED, 1 if request.quick else request.rounds or 5
    rows = []
    for shape in SHAPES[3:4] if request.quick else SHAPES:
        rows += _rows(shape, tuple(names), torch.bfloat16, library, rounds)
    if not request.quick:
        rows += _rows(SHAPES[0], tuple(names), torch.float32, library, rounds)
    yield "linear_cpu", {"isa": isa, "rows": rows}


def _rows(
    shape: tuple[int, int], names: tuple[str, ...], dtype: torch.dtype, library: Library, rounds: int
) -> list[dict[str, Any]]:
    """Return one row per format and number of rows, whose measurements alternate."""
    weights = {name: copies_of(name, *shape, dtype) for name in names}
    runs = {(name, rows): passes(weights[name], rows, dtype, library) for rows in ROWS for name in names}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    rates = []
    for _ in range(rounds):
        rates.append(read_rate())
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            times[key].append((time.perf_counter() - start) / len(weights[key[0]]))
    rate = statistics.median(rates)
    result = []
    for (name, rows), each in times.items():
        median, size = statistics.median(each), weights[name][0].nbytes
        result.append(
            {
                "format": name,
                "dtype": str(dtype).removeprefix("torch."),
                "outputs": shape[0],
                "inputs": shape[1],
                "rows": rows,
                "us": round(median * 1e6, 1),
                "weight_gb_per_second": round(size / median / 1e9, 1),
                "share_of_read_rate": round(size / median / 1e9 / rate, 2),
                "times_one_row": round(median / statistics.median(times[name, 1]), 2),
                "read_gb_per_second": round(rate, 1),
            }
        )
    return result
