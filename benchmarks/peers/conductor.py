"""The conductor's side of the protocol: starts workers, and stops those that are not being measured."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.rows import Row

__all__ = ["Failed", "Worker", "environments", "last_words", "not_installed"]

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 900.0
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b(:|$)")


class Failed(Exception):
    """A worker ended or did not answer in time; the message has the last line of its log."""


def environments() -> Path:
    """Return the folder of the peers' environments and models: PEERS, or else `benchmarks/peers/env`."""
    return Path(os.environ.get("PEERS") or Path(__file__).parent / "env")


def not_installed(row: Row) -> str:
    """Return why a row cannot be measured here; empty if it can."""
    if not row.environment or (environments() / row.environment / "bin" / "python").exists():
        return ""
    return f"not installed; run: benchmarks/peers/install {row.environment}"


class Worker:
    """A peer's process, which runs while it handles a request and is stopped otherwise, with all its threads.

    Use it as a context manager: the process ends with the block.
    """

    def __init__(self, row: Row, log: Path, command: list[str] | None = None) -> None:
        """Start the process.

        Args:
            row: The row whose worker is started.
            log: The file that receives the process's output other than its answers.
            command: The command to run instead of the row's worker.
        """
        self.row = row
        self._log = log
        python = environments() / row.environment / "bin" / "python" if row.environment else sys.executable
        log.parent.mkdir(parents=True, exist_ok=True)
        # Keep the caller's PYTHONPATH for the engine: its environment may find the package through it only.
        path = os.pathsep.join(
            filter(None, (str(_ROOT), os.environ.get("PYTHONPATH") if not row.environment else ""))
        )
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command or [str(python), "-m", f"benchmarks.peers.workers.{row.worker}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": path},
                text=True,
                start_new_session=True,  # its children are stopped with it
            )
        self._stop()

    def __enter__(self) -> Worker:
        """Return the worker itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, do: str, **request: Any) -> Any:
        """Send a request, and let the process run until it has answered.

        Raises:
            Failed: The process ended, or took longer than a quarter of an hour.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Timer(_PATIENCE_S, self._signal, (signal.SIGKILL,))
        late.start()
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            self._stop()
            late.cancel()
        if not line:
            raise Failed(f"{do}: {self._last_words()}")
        return json.loads(line)

    def _stop(self) -> None:
        """Stop all threads, and wait until they have stopped."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        return last_words(self._log.read_text(errors="replace")) or (
            f"the process ended with status {self._process.poll()}"
        )


def last_words(log: str) -> str:
    """Return why a process died: the last line that names an exception, or else the last line.

    The last line alone would not do: progress bars may be drawn after the traceback, when their threads end.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return (named or lines or [""])[-1]
