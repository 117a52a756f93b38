"""Chooses the launch of a bucket of shapes: the fastest of those that compile within its bounds.

Starting from the current launch, one size at a time is changed to each of its choices; a candidate that is
faster by a margin is kept, until no change helps. A candidate is compiled first, and skipped if it spills,
needs more than the GPU has, or gives different results. Without a clock nothing is timed: the current launch
is kept if it is within its bounds, else the nearest one that is replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.kernels.triton.tables import read
from slipstream.kernels.triton.target import Bucket, Build, Launch

__all__ = ["Found", "Subject", "chosen", "held", "neighbours", "write"]

MARGIN = 0.03
"""The fraction by which a candidate must be faster: smaller differences are noise."""

_MOST_SWEEPS = 3


@dataclass(frozen=True)
class Subject:
    """One bucket of shapes, with a form and a call that represent it.

    Attributes:
        build: A form to compile; its bucket is tuned, and its launch is the one given by the kernel's rule.
        prepare: Makes, on the GPU, a call of the kernel with typical shapes, which uses the launch on trial.
    """

    build: Build
    prepare: Callable[[], Callable[[], Any]]

    @property
    def bucket(self) -> Bucket:
        """The bucket that is tuned."""
        if self.build.bucket is None:
            raise ValueError(f"{self.build.name} is in no bucket, so there is nothing to tune")
        return self.build.bucket


@dataclass(frozen=True)
class Found:
    """The result of tuning a bucket.

    Attributes:
        launch: The chosen launch; None if no candidate is within its bounds.
        microseconds: Time of a call; None if nothing was timed.
        asked: Number of candidates that were compiled.
        refused: Candidates that violate a bound, with the bounds that they violate.
    """

    launch: Launch | None
    microseconds: float | None
    asked: int
    refused: Mapping[str, str]


def held(launch: Launch) -> str:
    """Describe a launch as text."""
    sizes = " ".join(f"{name}={value}" for name, value in launch.sizes.items())
    return f"{sizes} warps={launch.warps} stages={launch.stages}".strip()


def neighbours(bucket: Bucket, launch: Launch) -> Iterator[list[Launch]]:
    """Yield, for each parameter that may be chosen, the launches that differ from `launch` only in it."""
    for name, values in bucket.choices.items():
        yield [replace(launch, sizes={**launch.sizes, name: v}) for v in values if v != launch.sizes[name]]
    yield [replace(launch, warps=n) for n in bucket.warps if n != launch.warps]
    yield [replace(launch, stages=n) for n in bucket.stages if n != launch.stages]


def chosen(
    bucket: Bucket,
    start: Launch,
    broken: Callable[[Launch], str],
    clock: Callable[[Launch], float | None] | None = None,
) -> Found:
    """Choose the launch of a bucket.

    Args:
        bucket: Kernel, shapes and choices.
        start: The current launch.
        broken: Compiles a launch and returns the bounds that it violates; empty if none.
        clock: Returns the microseconds of a launch, or None if it fails or its results differ; None to time
            nothing.
    """
    seen: dict[str, str] = {}

    def survives(launch: Launch) -> bool:
        if held(launch) not in seen:
            seen[held(launch)] = broken(launch)
        return not seen[held(launch)]

    best = start if survives(start) else _nearest(bucket, start, survives)
    time = None if best is None or clock is None else clock(best)
    if best is not None and clock is not None:
        best, time = _fastest(bucket, best, time, lambda one: clock(one) if survives(one) else None)
    return Found(best, time, len(seen), {name: why for name, why in seen.items() if why})


def _nearest(bucket: Bucket, start: Launch, survives: Callable[[Launch], bool]) -> Launch | None:
    """Return the first launch that survives, of those that differ in one parameter, or else in two."""
    near = [one for some in neighbours(bucket, start) for one in some]
    found = next((one for one in near if survives(one)), None)
    if found is not None:
        return found
    far = (one for first in near for some in neighbours(bucket, first) for one in some)
    return next((one for one in far if survives(one)), None)


def _fastest(
    bucket: Bucket, best: Launch, time: float | None, clock: Callable[[Launch], float | None]
) -> tuple[Launch, float | None]:
    """Change candidate parameter at a time for as long as it helps."""
    timed = {held(best): time}
    for _ in range(_MOST_SWEEPS):
        before = best
        for index in range(len(bucket.choices) + 2):
            for candidate in list(neighbours(bucket, best))[index]:
                if held(candidate) not in timed:
                    timed[held(candidate)] = clock(candidate)
                candidate_time = timed[held(candidate)]
                if candidate_time is not None and (time is None or candidate_time < time * (1 - MARGIN)):
                    best, time = candidate, candidate_time
        if best is before:
            break
    return best, time


def write(folder: Path, generation: int, found: Mapping[Bucket, Found], **said: str) -> Path:
    """Write results into the generation's table, keep its entries of other buckets, and return the file.

    Args:
        folder: The folder of the tables.
        generation: Compute capability as one number.
        found: Results by bucket; a bucket without a launch gets no entry, so the kernel's rule applies.
        said: Further entries that record the origin: `triton`, and `on`, the GPU that timed it.
    """
    file = folder / f"sm_{generation}.json"
    kernels: dict[str, dict[str, Any]] = read(file)["kernels"] if file.exists() else {}
    for bucket, one in found.items():
        buckets = kernels.setdefault(bucket.kernel, {})
        buckets.pop(bucket.shape, None)
        if one.launch is None:
            continue
        sizes = {name: one.launch.sizes[name] for name in bucket.choices}
        timed = {} if one.microseconds is None else {"us": round(one.microseconds, 2)}
        numbers = {"warps": one.launch.warps, "stages": one.launch.stages}
        buckets[bucket.shape] = {"sizes": sizes, **numbers, **timed, **said}
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{{\n  "generation": {generation},\n  "kernels": {{\n{_lines(kernels)}\n  }}\n}}\n')
    return file


def _lines(kernels: Mapping[str, Mapping[str, Any]]) -> str:
    """Format one line for each bucket, so that diffs are readable."""
    parts = []
    for kernel in sorted(kernels):
        rows = [f"      {json.dumps(shape)}: {json.dumps(e)}" for shape, e in sorted(kernels[kernel].items())]
        parts.append(f"    {json.dumps(kernel)}: {{\n" + ",\n".join(rows) + "\n    }")
    return ",\n".join(parts)
