"""The runner: `python -m benchmarks.run [NAME ...]` measures and writes one file of `results/` for each name.

A benchmark is a module here with `measure(quick) -> list of rows`; a row is a flat dictionary that names its
shape, and has a median and a range for whatever it measured. A baseline's rows come from the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import generate, load
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
BENCHMARKS: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "generate": generate.measure,
    "load": load.measure,
}


def main() -> None:
    """Run what the command line names, everything without a name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all without one"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small models, to see that it runs; writes nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in arguments.names or BENCHMARKS:
        machine = describe()
        rows = BENCHMARKS[name](arguments.quick)
        print(f"{name}: {machine['device']}, {machine['threads']} threads, torch {machine['torch']}")
        print(table(rows))
        if not arguments.quick:
            arguments.out.mkdir(parents=True, exist_ok=True)
            path = arguments.out / f"{name}.json"
            path.write_text(json.dumps({"benchmark": name, **machine, "rows": rows}, indent=1) + "\n")
            print(f"written to {path}\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text, one column for each key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
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
