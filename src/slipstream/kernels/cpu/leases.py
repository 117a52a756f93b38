"""Blocks whose matrices are on lease: the library calls back before it begins each block and after it."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext

from slipstream.kernels.cpu.abi import StackCall
from slipstream.kernels.requirements import BlockLike

__all__ = ["Turns"]

_Turn = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Turns:
    """Takes and ends the leases of some blocks when a native call calls back.

    An error while a lease is taken ends the native call early, and is raised by `check`.
    """

    def __init__(self, leases: Sequence[AbstractContextManager[None] | None]) -> None:
        """Keep a lease for each block of the call, in order; None for a block that needs no lease."""
        self._leases = [nullcontext() if lease is None else lease for lease in leases]
        self._failed, self._error = ctypes.c_int32(0), None
        turns = self._take()
        next(turns)
        self._turn = _Turn(turns.send)

    @classmethod
    def of(cls, blocks: Sequence[BlockLike]) -> Turns | None:
        """Return the turns of some blocks, or None if none of them needs a lease."""
        leases = [block.weights.lease for block in blocks]
        return None if all(lease is None for lease in leases) else cls(leases)

    def point(self, call: StackCall) -> None:
        """Make a native call use this object, which must outlive the call."""
        call.turn = ctypes.cast(self._turn, ctypes.c_void_p)
        call.failed = ctypes.addressof(self._failed)

    def check(self) -> None:
        """Raise the error that a lease has raised since the last check, if any."""
        error, self._error, self._failed.value = self._error, None, 0
        if error is not None:
            raise error

    _error: BaseException | None

    # A generator resumes within its `try`; an exception that a signal raises as a function begins is lost.
    def _take(self) -> Generator[None, int, None]:
        while True:
            try:
                while True:
                    block = yield  # the block begins
                    with self._leases[block]:
                        yield  # the block has ended
            except GeneratorExit:
                return
            except BaseException as error:  # no exception passes through the library; `check` raises it
                self._error, self._failed.value = error, 1
