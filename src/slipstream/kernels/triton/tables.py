"""How kernels are launched, by kernel, GPU generation and shape bucket: `tables/sm_*.json`.

Each kernel's file has a rule that fits every shape. A table has what `scripts/tune_kernels` found to be
better for a bucket of shapes on one generation; it is read once, and nothing is tuned at run time. What a
table says about a bucket replaces some of the rule's sizes, its warps and its stages:

    {"generation": 90, "kernels": {"norm": {"4096": {
        "sizes": {}, "warps": 8, "stages": 1, "triton": "3.6.0", "us": 2.9, "on": "NVIDIA H200"}}}}

`us` and `on` are absent where nothing was timed: such an entry is what compiles within its bounds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.kernels.triton.target import Bucket, Launch, interpreted

__all__ = ["FOLDER", "launched", "read", "trial"]

FOLDER = Path(__file__).parent / "tables"
"""Where the package keeps its tables."""


_trials: dict[tuple[str, str], Launch] = {}


def launched(bucket: Bucket, rule: Launch, generation: int) -> Launch:
    """Return how a bucket is launched: as on trial, else as in the generation's table, else by the rule.

    Args:
        bucket: Kernel and shapes.
        rule: The kernel's own answer, with all sizes.
        generation: Compute capability as one number (80, 90).
    """
    if _trials and (bucket.kernel, bucket.shape) in _trials:
        return _trials[bucket.kernel, bucket.shape]
    if interpreted():  # there a program costs more than what it computes: rules are made for that
        return rule
    found = _table(generation).get(bucket.kernel, {}).get(bucket.shape)
    if found is None:
        return rule
    return Launch({**rule.sizes, **found["sizes"]}, found["warps"], found["stages"])


@contextmanager
def trial(bucket: Bucket, launch: Launch) -> Iterator[None]:
    """Launch a bucket like this for a while; for tuners and tests, in one thread.

    Args:
        bucket: Kernel and shapes.
        launch: With all of the kernel's sizes.
    """
    _trials[bucket.kernel, bucket.shape] = launch
    try:
        yield
    finally:
        del _trials[bucket.kernel, bucket.shape]


def read(file: Path) -> dict[str, Any]:
    """Return what a table's file holds.

    Raises:
        ValueError: It is no table; the message names file and entry.
    """
    held = json.loads(file.read_text())
    for kernel, buckets in held["kernels"].items():
        for shape, entry in buckets.items():
            numbers = [*entry["sizes"].values(), entry["warps"], entry["stages"]]
            if not all(isinstance(n, int) and n > 0 for n in numbers):
                raise ValueError(
                    f"{file.name}: {kernel}, {shape}: sizes are positive integers, not {numbers}"
                )
    return dict(held)


@functools.cache
def _table(generation: int) -> dict[str, dict[str, Any]]:
    """Buckets by kernel of a generation; empty where nobody has tuned for it."""
    file = FOLDER / f"sm_{generation}.json"
    return read(file)["kernels"] if file.exists() else {}
