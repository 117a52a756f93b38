"""Blocks whose matrices are there for a while only: the library tells when it begins and ends with each."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext

from slipstream.kernels.cpu.abi import StackCall
from slipstream.kernels.requirements import BlockLike

__all__ = ["Turns"]

_Turn = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Turns:
    """Takes and ends the leases of some blocks as a native call asks for them.

    An error while a lease is taken ends the call, and is raised by `check`.
    """

    def __init__(self, leases: Sequence[AbstractContextManager[None] | None]) -> None:
        """One for each block of the call, in order; None where it has its matrices for good."""
        self._leases = [nullcontext() if lease is None else lease for lease in leases]
        self._failed, self._error = ctypes.c_int32(0), None
        turns = self._take()
        next(turns)
        self._turn = _Turn(turns.send)

    @classmethod
    def of(cls, blocks: Sequence[BlockLike]) -> Turns | None:
        """The turns of blocks, or None where all of them have their matrices for good."""
        leases = [block.weights.lease for block in blocks]
        return None if all(lease is None for lease in leases) else cls(leases)

    def point(self, call: StackCall) -> None:
        """Let a call take its turns here; this must outlive it."""
        call.turn = ctypes.cast(self._turn, ctypes.c_void_p)
        call.failed = ctypes.addressof(self._failed)

    def check(self) -> None:
        """Raise what a lease has raised since the last check."""
        error, self._error, self._failed.value = self._error, None, 0
        if error is not None:
            raise error

    _error: BaseException | None

    # A generator, which goes on within its `try`: what a signal raises as a function begins would be lost.
    def _take(self) -> Generator[None, int, None]:
        while True:
            try:
                while True:
                    block = yield  # it begins
                    with self._leases[block]:
                        yield  # and ends
            except GeneratorExit:
                return
            except BaseException as error:  # no exception passes through the library; `check` raises it
                self._error, self._failed.value = error, 1
