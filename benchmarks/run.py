"""The runner: `python -m benchmarks.run [NAME ...]` measures, and writes into `results/`.

A benchmark is a module with `measure(request)`, which yields pairs of a file name and its content: `rows`,
flat dictionaries with the shape, and a median and a range for each measurement, and any further entries. The
rows of a baseline come from the same run. Every file also describes the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    assisted,
    attention_cpu,
    crowded_cpu,
    decode_cpu,
    diffusion,
    families_cpu,
    generate,
    linear_cpu,
    load,
    matmul_cpu,
    quality,
    refresh,
    sampling,
)
from benchmarks.machine import describe
from benchmarks.peers import measure as peers
from benchmarks.request import Request

RESULTS = Path(__file__).parent / "results"
BENCHMARKS: dict[str, Callable[[Request], Iterator[tuple[str, dict[str, Any]]]]] = {
    "peers": peers.measure,
    "assisted": assisted.measure,
    "attention_cpu": attention_cpu.measure,
    "crowded_cpu": crowded_cpu.measure,
    "decode_cpu": decode_cpu.measure,
    "diffusion": diffusion.measure,
    "families_cpu": families_cpu.measure,
    "linear_cpu": linear_cpu.measure,
    "matmul_cpu": matmul_cpu.measure,
    "generate": generate.measure,
    "load": load.measure,
    "quality": quality.measure,
    "refresh": refresh.measure,
    "sampling": sampling.measure,
}
PARTS: Mapping[str, Sequence[str]] = {
    "diffusion": diffusion.PARTS,
    "families_cpu": families_cpu.PARTS,
    "linear_cpu": linear_cpu.PARTS,
    "refresh": refresh.PARTS,
}
"""The values that `--only` accepts, by benchmark; `peers` checks its own."""
_UNSHOWN = ("version", "notes", "weight_bytes", "parameters")


def main() -> None:
    """Run the benchmarks that the command line names, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all without one"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small models, to see that it runs; writes nothing without --out"
    )
    parser.add_argument("--rounds", type=int, default=0, help="turns of each row")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PART",
        help="of peers: MODEL or MODEL/PRECISION; of linear_cpu: a weight format; of refresh: float32, "
        "bfloat16, int8 or int4; of diffusion: compile, for a row of torch.compile beside the others; "
        "of families_cpu: a model; repeatable",
    )
    parser.add_argument(
        "--dtype",
        choices=families_cpu.DTYPES,
        default="",
        help=f"of families_cpu: the dtype of the models (default: {families_cpu.DTYPES[0]})",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="ROW",
        help="of peers: leave out rows whose names begin so, as the slowest where time is short; repeatable",
    )
    parser.add_argument("--out", type=Path, help=f"folder of the results (default: {RESULTS})")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if arguments.rounds < 0:
        parser.error(f"--rounds {arguments.rounds}: give 1 or more")
    request = Request(
        arguments.quick,
        arguments.rounds,
        tuple(arguments.only),
        tuple(arguments.without),
        arguments.dtype,
    )
    out = arguments.out or (None if arguments.quick else RESULTS)
    try:
        for benchmark in arguments.names or BENCHMARKS:
            refuse_words(benchmark, request)
    except ValueError as error:
        parser.error(str(error))
    for benchmark in arguments.names or BENCHMARKS:
        machine = describe()
        try:
            for name, result in BENCHMARKS[benchmark](request):
                publish(name, {"benchmark": benchmark, **machine, **result}, out)
        except ValueError as error:
            parser.error(str(error))


def refuse_words(benchmark: str, request: Request) -> None:
    """Refuse values of `--only`, `--without` and `--dtype` that a benchmark does not accept and would ignore.

    Raises:
        ValueError: A value is not accepted; the message lists those that are.
    """
    if request.dtype and benchmark != "families_cpu":
        raise ValueError(f"{benchmark} takes no --dtype; only families_cpu does")
    if benchmark == "peers":  # checks its own values
        return
    if request.without:
        raise ValueError(f"{benchmark} takes no --without; only peers does")
    known = PARTS.get(benchmark, ())
    for word in request.only:
        if not known:
            raise ValueError(f"{benchmark} takes no --only; only peers, {', '.join(PARTS)} do")
        if word not in known:
            raise ValueError(f"{benchmark} --only takes {', '.join(known)}, not {word!r}")


def publish(name: str, result: dict[str, Any], out: Path | None) -> None:
    """Print the rows of one results file, and write it to `out` if given."""
    print(f"{name}: {result['device']}, {result['threads']} threads, torch {result['torch']}")
    print(table(result["rows"]))
    if out is not None:
        path = out / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}\n", flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Format rows as aligned text, with one column for each key."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in _UNSHOWN]
    lines = [keys, *([_cell(row.get(key, "")) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "..".join(_cell(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
