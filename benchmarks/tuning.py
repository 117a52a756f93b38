"""How a launch is chosen for a bucket of shapes: what compiles within its bounds, and of that the fastest.

From the launch that stands, one size at a time is changed to each of its choices; what is faster by a margin
is kept, until no change helps. A candidate is compiled first, and left out where it spills, or asks for more
than the GPU has; one whose results differ is left out as well. Without a clock nothing is timed: the launch
that stands is kept if it holds to its bounds, else the nearest that does is taken.
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
"""By how much a candidate must be faster: less is noise."""

_MOST_SWEEPS = 3


@dataclass(frozen=True)
class Subject:
    """One bucket of shapes, and what stands for it.

    Attributes:
        build: A form to compile; its bucket is what is tuned, its launch the rule's.
        prepare: Makes, on the GPU, a call of the kernel with typical shapes; it takes the launch on trial.
    """

    build: Build
    prepare: Callable[[], Callable[[], Any]]

    @property
    def bucket(self) -> Bucket:
        """What is tuned."""
        if self.build.bucket is None:
            raise ValueError(f"{self.build.name} is in no bucket, so there is nothing to tune")
        return self.build.bucket


@dataclass(frozen=True)
class Found:
    """What was chosen for a bucket.

    Attributes:
        launch: The choice; None where nothing holds to its bounds.
        microseconds: Of a call, None where nothing was timed.
        asked: Candidates that were compiled.
        refused: Of these, those that broke a bound, with what they broke.
    """

    launch: Launch | None
    microseconds: float | None
    asked: int
    refused: Mapping[str, str]


def held(launch: Launch) -> str:
    """A launch in words."""
    sizes = " ".join(f"{name}={value}" for name, value in launch.sizes.items())
    return f"{sizes} warps={launch.warps} stages={launch.stages}".strip()


def neighbours(bucket: Bucket, launch: Launch) -> Iterator[list[Launch]]:
    """Launches that differ in one thing: a list for each thing that may be chosen."""
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
    """Choose how a bucket is launched.

    Args:
        bucket: Kernel, shapes and choices.
        start: The launch that stands.
        broken: Compiles a launch and says what bound it breaks; empty where none.
        clock: Microseconds of a launch, None where it fails or its results differ; None to time nothing.
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
    """The first launch that survives: of those that differ in one thing, else of those that do in two."""
    near = [one for some in neighbours(bucket, start) for one in some]
    found = next((one for one in near if survives(one)), None)
    if found is not None:
        return found
    far = (one for first in near for some in neighbours(bucket, first) for one in some)
    return next((one for one in far if survives(one)), None)


def _fastest(
    bucket: Bucket, best: Launch, time: float | None, clock: Callable[[Launch], float | None]
) -> tuple[Launch, float | None]:
    """Change one thing at a time for as long as it helps."""
    timed = {held(best): time}
    for _ in range(_MOST_SWEEPS):
        before = best
        for index in range(len(bucket.choices) + 2):
            for one in list(neighbours(bucket, best))[index]:
                if held(one) not in timed:
                    timed[held(one)] = clock(one)
                found = timed[held(one)]
                if found is not None and (time is None or found < time * (1 - MARGIN)):
                    best, time = one, found
        if best is before:
            break
    return best, time


def write(folder: Path, generation: int, found: Mapping[Bucket, Found], **said: str) -> Path:
    """Put what was found into the generation's table, beside what it had of other buckets.

    Args:
        folder: Of the tables.
        generation: Compute capability as one number.
        found: By bucket; a bucket for which nothing holds to its bounds is left to the rule.
        said: What an entry says of its making: `triton`, and `on`, the GPU that timed it.
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
    """One line for each bucket, so that changes can be read."""
    parts = []
    for kernel in sorted(kernels):
        rows = [f"      {json.dumps(shape)}: {json.dumps(e)}" for shape, e in sorted(kernels[kernel].items())]
        parts.append(f"    {json.dumps(kernel)}: {{\n" + ",\n".join(rows) + "\n    }")
    return ",\n".join(parts)
