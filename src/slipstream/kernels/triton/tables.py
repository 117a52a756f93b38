"""Launch parameters by kernel, GPU generation and shape bucket: `tables/sm_*.json`.

Each kernel's file has a rule that works for every shape. A table holds what `scripts/tune_kernels` found to
be better for a bucket of shapes on one generation; it is read once, and nothing is tuned at run time. The
table's entry for a bucket replaces some of the rule's sizes, its warps and its stages:

    {"generation": 90, "kernels": {"norm": {"4096": {
        "sizes": {}, "warps": 8, "stages": 1, "triton": "3.6.0", "us": 2.9, "on": "NVIDIA H200"}}}}

`us` and `on` are absent where nothing was timed: such an entry was chosen because it compiles within the
kernel's bounds.
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
"""The folder of the package's tables."""


_trials: dict[tuple[str, str], Launch] = {}


def launched(bucket: Bucket, rule: Launch, generation: int) -> Launch:
    """Return a bucket's launch parameters: those on trial, else of the generation's table, else of the rule.

    Args:
        bucket: Kernel and shapes.
        rule: The launch parameters by the kernel's rule, with all sizes.
        generation: Compute capability as one number (80, 90).
    """
    if _trials and (bucket.kernel, bucket.shape) in _trials:
        return _trials[bucket.kernel, bucket.shape]
    if interpreted():  # a program then costs more than what it computes, which rules take into account
        return rule
    entry = _table(generation).get(bucket.kernel, {}).get(bucket.shape)
    if entry is None:
        return rule
    return Launch({**rule.sizes, **entry["sizes"]}, entry["warps"], entry["stages"])


@contextmanager
def trial(bucket: Bucket, launch: Launch) -> Iterator[None]:
    """Use given launch parameters for a bucket within the context; for tuners and tests, in one thread.

    Args:
        bucket: Kernel and shapes.
        launch: The launch parameters, with all of the kernel's sizes.
    """
    _trials[bucket.kernel, bucket.shape] = launch
    try:
        yield
    finally:
        del _trials[bucket.kernel, bucket.shape]


def read(file: Path) -> dict[str, Any]:
    """Return the contents of a table's file.

    Raises:
        ValueError: An entry is invalid; the message names file and entry.
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
    """Return a generation's buckets by kernel; empty where no table exists for it."""
    file = FOLDER / f"sm_{generation}.json"
    return read(file)["kernels"] if file.exists() else {}
