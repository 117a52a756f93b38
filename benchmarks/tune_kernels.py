"""Chooses the launches of the GPU kernels, and writes the tables that the package ships.

    scripts/tune_kernels [--only WORD] [--minutes N] [--jobs N]       on a GPU: times what compiles
    scripts/tune_kernels --ahead [--generation 80|90]                 anywhere: what compiles within bounds

Each entry is written as soon as it is found; a run that ends early leaves the other buckets unchanged.
`--only` selects the buckets whose kernel or shape contains a word ("one row", int4); with `--jobs`, that many
processes compile the likely candidates beforehand.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# Kernels are compiled here, never interpreted; Triton reads this variable when it is imported.
os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton

from benchmarks.tune_subjects import subjects
from benchmarks.tuning import Found, Subject, chosen, held, neighbours, write
from slipstream.kernels.triton.ahead_of_time import compile_ahead, faults
from slipstream.kernels.triton.tables import FOLDER, launched, trial
from slipstream.kernels.triton.target import Launch, generation

_COLD = 300 << 20
"""Bytes of weights after whose use the first of them are in no cache any more."""

KNOWN = (80, 90)
"""Generations whose forms can be compiled ahead of time."""


def bounds(subject: Subject, target: str) -> Callable[[Launch], str]:
    """Return a function that compiles a launch of a subject and names the bounds that it violates."""

    def broken(launch: Launch) -> str:
        form = dataclasses.replace(subject.build, launch=launch, bucket=None)
        try:
            return "; ".join(faults(compile_ahead(form, target)))
        except Exception as error:  # noqa: BLE001 - whatever a compiler refuses is no candidate
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"

    return broken


def warm(subjects_of: list[Subject], number: int, jobs: int) -> dict[str, dict[str, str]]:
    """Compile the likely candidates in `jobs` processes; Triton caches the results on disk.

    Returns:
        By subject and launch (as text), the bounds that it violates.
    """
    asked = [(index, one) for index, s in enumerate(subjects_of) for one in _likely(s, number)]
    names = [f"{s.bucket.kernel}, {s.bucket.shape}" for s in subjects_of]
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Contiguous parts keep the launches of a subject together, so that a process prepares it once.
        size = -(-len(asked) // jobs)
        parts = [asked[start : start + size] for start in range(0, len(asked), size)]
        work = [[(names[index], one) for index, one in part] for part in parts]
        for said in pool.map(_warm_some, work, [number] * len(work)):
            for name, launch, why in said:
                found[name][launch] = why
    return found


def _likely(subject: Subject, number: int) -> list[Launch]:
    standing = launched(subject.bucket, subject.build.launch, number)
    return [standing, *(one for some in neighbours(subject.bucket, standing) for one in some)]


def _warm_some(asked: list[tuple[str, Launch]], number: int) -> list[tuple[str, str, str]]:
    by_name = {f"{s.bucket.kernel}, {s.bucket.shape}": s for s in subjects(number)}
    results = []
    run: Callable[[], Any] | None = None
    last = ""
    for name, launch in asked:
        subject = by_name[name]
        if name != last:
            run, last = subject.prepare(), name
        why = bounds(subject, f"sm_{number}")(launch)
        if not why and run is not None:
            try:
                with trial(subject.bucket, launch):
                    run()
            except Exception as error:  # noqa: BLE001 - a launch that the driver refuses is no candidate
                why = f"{type(error).__name__}: {str(error)[:120]}"
        results.append((name, held(launch), why))
    return results


class GpuClock:
    """Times a subject's call on the GPU, in a captured graph of many calls whose weights are in no cache.

    Launches follow each other in the same way in a decode step, so the figure includes the launch overhead.
    """

    def __init__(self, subject: Subject, rule: Launch) -> None:
        """Prepare the calls, and keep the result of one with the rule's launch for comparison."""
        self._bucket = subject.bucket
        before = torch.cuda.memory_allocated()
        self._calls = [subject.prepare()]
        each = max(torch.cuda.memory_allocated() - before, 1)
        self._calls += [subject.prepare() for _ in range(min(max(_COLD // each, 6), 30) - 1)]
        with trial(self._bucket, rule):
            self._right = self._calls[0]().clone()

    def __call__(self, launch: Launch) -> float | None:
        """Return the microseconds of a call, the least of five; None if it fails or its result differs."""
        try:
            with trial(self._bucket, launch):
                if not self._agrees(self._calls[0]()):
                    return None
                return self._chained()
        except Exception as error:  # noqa: BLE001 - a launch that the driver refuses is no candidate
            print(f"    {held(launch)}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            return None

    def _agrees(self, got: Any) -> bool:
        if not self._right.is_floating_point():
            return torch.equal(got, self._right)
        most = self._right.abs().max().clamp(min=1e-6)
        return float((got.float() - self._right.float()).abs().max() / most) < 2e-2

    def _chained(self) -> float:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for call in self._calls:
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in self._calls:
                call()
        graph.replay()
        return min(self._once(graph) for _ in range(5)) / len(self._calls)

    def _once(self, graph: torch.cuda.CUDAGraph) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return 1e3 * before.elapsed_time(after)


def tuned(numbers: tuple[int, ...], given: argparse.Namespace) -> Iterator[tuple[int, Subject, Found]]:
    """Yield the generation, subject and result of each subject that is tuned, in order."""
    start = time.monotonic()
    for number in numbers:
        named = [(f"{s.bucket.kernel}, {s.bucket.shape}", s) for s in subjects(number)]
        named = [(name, s) for name, s in named if all(word in name for word in given.only or ())]
        known = warm([s for _, s in named], number, given.jobs) if given.jobs and not given.ahead else {}
        for name, subject in named:
            if time.monotonic() - start > 60 * given.minutes:
                print("the minutes are over; what was not asked stays as it was")
                return
            rule = subject.build.launch
            clock = None if given.ahead else GpuClock(subject, rule)
            standing = rule if given.ahead else launched(subject.bucket, rule, number)
            yield (
                number,
                subject,
                chosen(
                    subject.bucket,
                    standing,
                    _remembered(known.get(name, {}), bounds(subject, f"sm_{number}")),
                    clock,
                ),
            )


def _remembered(known: dict[str, str], broken: Callable[[Launch], str]) -> Callable[[Launch], str]:
    return lambda launch: known[held(launch)] if held(launch) in known else broken(launch)


def main(given: list[str] | None = None) -> int:
    """Parse the command line, tune and write the tables, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/tune_kernels", description=__doc__.partition("\n")[0])
    parser.add_argument("--ahead", action="store_true", help="compile only; needs no GPU")
    parser.add_argument("--generation", type=int, action="append", choices=KNOWN, help="with --ahead; all")
    parser.add_argument("--only", action="append", metavar="WORD", help="buckets that have it in their name")
    parser.add_argument("--minutes", type=float, default=1e6, help="no bucket begins later than this")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile what is asked first")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the tables")
    arguments = parser.parse_args(given)
    if not arguments.ahead and not torch.cuda.is_available():
        print("tune_kernels: torch sees no GPU here; --ahead chooses by what compiles")
        return 2
    numbers = tuple(arguments.generation or KNOWN)
    said = {"triton": triton.__version__}
    if not arguments.ahead:
        numbers = (generation(torch.device("cuda", torch.cuda.current_device())),)
        said["on"] = torch.cuda.get_device_name()
    if numbers[0] not in KNOWN:
        print(f"tune_kernels: generation {numbers[0]} is not one of {KNOWN}; its kernels run by their rules")
        return 2
    without = 0
    for number, subject, found in tuned(numbers, arguments):
        write(arguments.out, number, {subject.bucket: found}, **said)
        launch = "nothing holds to its bounds" if found.launch is None else held(found.launch)
        took = "" if found.microseconds is None else f"{found.microseconds:.1f} us, "
        changed = "" if found.launch in (None, subject.build.launch) else "  changed"
        counts = f"{took}{found.asked} asked, {len(found.refused)} refused{changed}"
        print(
            f"sm_{number} {subject.bucket.kernel}, {subject.bucket.shape}: {launch}  ({counts})", flush=True
        )
        without += found.launch is None
    return 1 if without else 0


if __name__ == "__main__":
    sys.exit(main())
