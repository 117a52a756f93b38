"""Four gloo processes that stay up for all tests: jobs are functions by name, and every rank answers.

Importing torch and transformers takes seconds, and a test milliseconds.
"""

from __future__ import annotations

import importlib
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
PATIENCE = 100.0

GROUPS: dict[int, Any] = {}
"""In a rank: the first ranks as groups, by their number. Made at once, by all, as torch wants it."""


class Pool:
    """Ranks that wait for jobs.

    Attributes:
        ranks: Their processes.
    """

    def __init__(self, place: Path, world: int = WORLD) -> None:
        self._place, self._world, self._starts = place, world, 0
        self._start()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.parallel.jobs"])  # imported once, for all ranks
        self._pipes: list[Connection] = []
        self.ranks: list[Any] = []
        self._starts += 1
        place = f"{self._place}.{self._starts}"
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._world, place, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self.ranks.append(process)

    def run(self, job: str, *args: Any, ranks: int | None = None, patience: float = PATIENCE) -> list[Any]:
        """Run `module:function(*args)` on the first ranks; what each returned, or raised.

        Ranks of which one does not answer are replaced: the others wait for it, and would answer the next job
        with what they say of this one.
        """
        pipes = self._pipes[:ranks]
        for pipe in pipes:
            pipe.send((job, args))
        answers = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(patience):
                said = [str(one.recv()) for one in pipes if one.poll()]
                self.close(0)
                self._start()
                raise TimeoutError(
                    f"rank {rank} did not answer {job} within {patience:.0f} s; others: {said}"
                )
            answers.append(pipe.recv())
        return answers

    def close(self, patience: float = 5.0) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.ranks:
            process.join(patience)
            if process.is_alive():
                process.kill()


class Failed(Exception):
    """What a rank raised, by class name, message and place."""

    def __init__(self, kind: str, message: str, place: str) -> None:
        super().__init__(kind, message, place)
        self.kind, self.message, self.place = kind, message, place

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.place}"


def _serve(rank: int, world: int, place: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world)
    GROUPS.update({size: dist.new_group(list(range(size))) for size in (2, 3, 4) if size <= world})
    while True:
        try:
            job, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        module, _, name = job.partition(":")
        try:
            answer = getattr(importlib.import_module(module), name)(*args)
        except BaseException as error:  # whatever it is, the test wants to see it
            answer = Failed(type(error).__name__, str(error), traceback.format_exc(limit=-6))
        pipe.send(answer)


def results(answers: list[Any]) -> list[Any]:
    """The answers, where no rank failed."""
    failed = [answer for answer in answers if isinstance(answer, Failed)]
    if failed:
        raise failed[0]
    return answers
