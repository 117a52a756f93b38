"""The sweep of every variant of every family on some ranks: `python -m tests.parallel 3`, with settings."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.families.sweep import VARIANTS, label
from tests.parallel.pool import Failed, Pool


def main(size: int, settings: dict[str, Any], names: list[str]) -> int:
    bad, worst, largest = 0, 0.0, 0.0
    chosen = [i for i, v in enumerate(VARIANTS) if not names or any(name in label(v) for name in names)]
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder) / "store")
        for index in chosen:
            answers = pool.run("tests.parallel.jobs:sweep", index, size, settings, ranks=size)
            failed = [answer for answer in answers if isinstance(answer, Failed)]
            row = failed[0] if failed else answers[0]
            right = not failed and row["greedy"] != "DIFFERENT"
            # One process may be farther from float64 than that.
            if right and row["error"] > 1e-4 and not settings.get("quant"):
                exact = pool.run("tests.parallel.jobs:off_float64", index, size, settings, ranks=size)[0]
                row |= {"ranks off float64": exact[0], "one process off float64": exact[1]}
                right = exact[0] <= exact[1]
                print(label(VARIANTS[index]), row, flush=True)
            elif right:
                right = row["error"] <= 1e-4
            if not failed:
                worst, largest = max(worst, row["error"]), max(largest, row["share"] or 0.0)
                right = right and (row["share"] or 0.0) <= 1.1
            bad += not right
            if names or not right:
                print(label(VARIANTS[index]), row if not failed else f"{row.kind}: {row.message}", flush=True)
        pool.close()
    print(
        f"{len(chosen)} variants on {size} ranks, {bad} of them wrong; largest error {worst:.1e}, largest "
        f"share of the bytes {largest:.2f} of 1/{size}"
    )
    return int(bad > 0)


if __name__ == "__main__":
    given = sys.argv[2] if len(sys.argv) > 2 else '{"replace_with_kernel_inject": true}'
    sys.exit(main(int(sys.argv[1]), json.loads(given), sys.argv[3:]))
