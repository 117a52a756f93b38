"""A worker's side of the protocol: a request is a line of JSON on stdin, its answer a line on stdout.

This module runs in every peer's environment, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Peer", "Timed", "prompts", "repeat", "serve"]


class Timed:
    """One greedy call: the times of its steps, and the tokens of the first sequence."""

    def __init__(self) -> None:
        """Start the clock."""
        self.start = time.perf_counter()
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.spared_bytes = 0

    def note(self, token: int) -> None:
        """Record a step that has ended, with the first sequence's token."""
        self.times.append(time.perf_counter() - self.start)
        self.tokens.append(token)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements as plain data.

        `first`: seconds to the first token; `step`: seconds per token after it, or None; `spared_bytes`:
        bytes of the weights that a step did not read.
        """
        steps = len(self.times) - 1
        step = (self.times[-1] - self.times[0]) / steps if steps else None
        return {
            "first": self.times[0],
            "step": step,
            "tokens": self.tokens,
            "spared_bytes": self.spared_bytes,
        }


class Peer(Protocol):
    """The requests that a peer can handle; a peer lacks the methods of those that it cannot."""

    def prepare(self, folder: str, precision: str) -> None:
        """Make what `load` needs from the checkpoint `folder/hf`, once."""

    def load(self, folder: str, precision: str, threads: int, **options: Any) -> dict[str, Any]:
        """Load the model; return `version` and `weight_bytes` (without tables that are only looked up)."""

    def generate(self, ids: list[list[int]], new: int) -> Timed:
        """Continue prompts of equal length by `new` tokens each, greedily, without stopping at any token."""

    def encode(self, ids: list[list[int]]) -> Callable[[], Any]:
        """Return a function that runs a forward over these sequences, ready to be timed."""


def prompts(vocabulary: int, batch: int, tokens: int) -> list[list[int]]:
    """Return random token ids, the same in every process."""
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(tokens)] for _ in range(batch)]


def repeat(call: Callable[[], Any], seconds: float = 0.3) -> float:
    """Return the median time of a call in seconds, repeated until `seconds` have passed."""
    times: list[float] = []
    while sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def serve(peer: Any) -> None:
    """Answer requests until stdin ends. An error ends the process; the conductor reads its log."""
    # Libraries print to stdout: redirect that to stderr, so that only answers go to the original stdout.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # A stopped process cannot notice that its conductor is gone; the kernel kills it (PR_SET_PDEATHSIG is 1).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_answer(peer, request)) + "\n")


def _answer(peer: Any, request: dict[str, Any]) -> Any:
    do = request.pop("do")
    if do == "generate":
        ids = prompts(request["vocabulary"], request["batch"], request["tokens"])
        return peer.generate(ids, request["new"]).to_dict()
    if do == "encode":
        call = peer.encode(prompts(request["vocabulary"], request["batch"], request["tokens"]))
        return {"seconds": repeat(call)}
    if do == "peak":
        return {"bytes": _peak_bytes()}
    return getattr(peer, do)(**request)


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
