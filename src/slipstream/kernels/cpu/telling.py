"""A native call of several steps that tells of each of them while it goes on with the next."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from slipstream.kernels.cpu.abi import ModelCall

__all__ = ["Telling"]

_Told = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)


class Telling:
    """Hands the tokens of each step but the last one of a call to a function, on the thread that calls.

    An error in that function ends the call after the step that runs meanwhile, and is raised by `check`.
    """

    def __init__(self, tokens: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Tell of what the call writes into `tokens` `(R, steps)`; `tell` takes copies, `(R,)`."""
        # Taken apart here: caches are cold between two steps, and to take a column took 40 us there.
        self._tokens, self._tell = tokens.unbind(1), tell
        self._error: BaseException | None = None
        self._told = _Told(self._step)

    def point(self, call: ModelCall) -> None:
        """Let a call tell of its steps here; this must outlive it."""
        call.told = ctypes.cast(self._told, ctypes.c_void_p)

    def check(self) -> None:
        """Raise what the function has raised."""
        if self._error is not None:
            raise self._error

    def _step(self, step: int) -> int:
        try:
            self._tell(self._tokens[step].clone())
        except BaseException as error:  # no exception passes through the library; `check` raises it
            self._error = error
            return 1
        return 0
