"""The options of a benchmark run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """The options from the command line.

    Attributes:
        quick: Use small models and few rounds, only to test that the benchmark runs.
        rounds: Number of rounds of each row; 0 for the benchmark's default.
        only: The parts to run, of a benchmark with parts (`run.PARTS`); empty for all of them.
        without: For `peers`: rows whose names begin with one of these are left out.
        dtype: For `families_cpu`: the dtype of the models; empty for the default.
    """

    quick: bool = False
    rounds: int = 0
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    dtype: str = ""
