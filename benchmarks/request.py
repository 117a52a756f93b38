"""What a benchmark is asked for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """The command line.

    Attributes:
        quick: Small models and few turns, to see that it runs.
        rounds: Turns of each row; 0 leaves the number to the benchmark.
        only: Parts of a benchmark that has parts, as `run.PARTS` lists them; empty for all of them.
        without: How the names of rows begin that are left out; of `peers`.
    """

    quick: bool = False
    rounds: int = 0
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
