"""The sweep of every variant of every family on some ranks: `python -m tests.parallel 3`, with settings.

Every k-th variant with `--every k`, and of these those whose label has one of the names that are given.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.families.sweep import VARIANTS, label
from tests.parallel.jobs import packs
from tests.parallel.pool import Failed, Pool

TOLERANCE = 1e-4


def main(given: argparse.Namespace) -> int:
    size, settings, start = given.size, json.loads(given.settings), time.monotonic()
    names = [label(variant) for variant in VARIANTS]
    chosen = [i for i, n in enumerate(names) if not given.names or any(part in n for part in given.names)]
    bad, errors, shares = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder) / "store")
        for index in chosen[:: given.every]:
            row = one(pool, index, size, settings)
            if "failed" not in row:
                errors.append((row["error"], names[index]))
                shares.append((row["share"] or 0.0, names[index]))
            if not row["right"]:
                bad.append(names[index])
            if given.names or not row["right"] or "one process off float64" in row:
                print(names[index], row, flush=True)
        pool.close()
    worst, largest = max(errors, default=(0.0, "-")), max(shares, default=(0.0, "-"))
    print(
        f"{len(chosen[:: given.every])} of {len(VARIANTS)} variants on {size} ranks in "
        f"{time.monotonic() - start:.0f} s, {len(bad)} of them wrong {bad}; largest error {worst[0]:.2e} "
        f"({worst[1]}), "
        + ("bytes not counted" if packs(settings) else f"bytes {largest[0]:.2f} of 1/{size} ({largest[1]})")
    )
    return int(bool(bad))


def one(pool: Pool, index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What the first rank measured of a variant, or why a rank failed, and whether that is right.

    Ranks that are farther from one process than is promised are held against float64, as one process is,
    which may be farther from it than the promise: they are right where they are nearer, or within it.
    """
    answers = pool.run("tests.parallel.jobs:sweep", index, size, settings, ranks=size)
    failed = [answer for answer in answers if isinstance(answer, Failed)]
    if failed:
        return {"failed": f"{failed[0].kind}: {failed[0].message}", "right": False}
    row: dict[str, Any] = answers[0]
    right = row["greedy"] != "DIFFERENT" and (row["share"] or 0.0) <= 1.1
    if right and row["error"] > TOLERANCE:
        exact = pool.run("tests.parallel.jobs:off_float64", index, size, settings, ranks=size)[0]
        row |= {"ranks off float64": exact[0], "one process off float64": exact[1]}
        right = exact[0] <= max(exact[1], TOLERANCE)
    return {**row, "right": right}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.parallel", description=__doc__)
    parser.add_argument("size", type=int)
    parser.add_argument("settings", nargs="?", default='{"replace_with_kernel_inject": true}')
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=1, metavar="K")
    sys.exit(main(parser.parse_args()))
