"""One native linear on the CPU: each weight format and a few rows, against the rate of reading memory.

    python -m benchmarks.linear_cpu [--rounds 5] [--formats plain int8] [--dtypes float32] [--out FILE]

Weights are cold: each pass goes through copies of a matrix that together exceed the caches. All take turns in
one process; figures are medians of passes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_cpu import read_rate
from benchmarks.machine import describe
from slipstream.formats import FORMATS, VARIANTS
from slipstream.kernels.cpu.abi import DTYPES, LinearCall
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.linear import Weight

SHAPES = ((5632, 2048), (2048, 5632), (576, 1536), (1536, 576), (49152, 576))
ROWS = (1, 2, 4, 8, 16)
FORMATS_MEASURED = ("plain", "int8", "int4", "int4-g64-sym", "fp8", "fp6")
COLD_BYTES = 192 << 20

Pass = Callable[[], None]


def copies_of(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> list[Weight]:
    """Equal weights, each with memory of its own."""
    dense = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    one = (FORMATS | VARIANTS)[name].weight(dense, None)
    return [one.apply(torch.clone) for _ in range(max(2, -(-COLD_BYTES // one.nbytes)))]


def passes(weights: list[Weight], rows: int, dtype: torch.dtype, library: Library) -> Pass:
    """One product with each of the weights, called as the engine calls the library."""
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


def measure(
    shape: tuple[int, int], names: list[str], dtype: torch.dtype, library: Library, rounds: int
) -> list[dict[str, Any]]:
    """One row per format and number of rows, in turns."""
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


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS_MEASURED))
    parser.add_argument("--shapes", nargs="+", type=int, default=list(range(len(SHAPES))))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--isa", default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    isa = options.isa or next(isa for isa in ISAS if refuse(isa) is None)
    library = load(isa)
    assert library is not None, f"this machine has no {isa}"
    result: dict[str, Any] = {"machine": describe(), "isa": isa, "rows": []}
    for dtype in (getattr(torch, name) for name in options.dtypes):
        for shape in (SHAPES[i] for i in options.shapes):
            for row in measure(shape, options.formats, dtype, library, options.rounds):
                result["rows"].append(row)
                print(*(f"{value!s:>12}" for value in row.values()), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
