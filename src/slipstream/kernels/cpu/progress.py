"""A native call of several steps that tells of each of them while it goes on with the next."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from torch import Tensor

from slipstream.kernels.cpu.abi_model import ModelCall

__all__ = ["telling"]

_Told = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)


@contextmanager
def telling(call: ModelCall, tokens: Tensor, tell: Callable[[Tensor], None]) -> Iterator[None]:
    """Let a call hand the tokens of each step but its last one to a function, on the thread that calls.

    Args:
        call: Runs within the context.
        tokens: What it writes into, `(R, steps)`.
        tell: Takes copies, `(R,)`. An error in it ends the call after the step that runs meanwhile, and is
            raised at the end of the context.
    """
    # Taken apart here: caches are cold between two steps, and to take a column took 40 us there.
    columns = tokens.unbind(1)
    errors: list[BaseException] = []

    # A generator, which goes on within its `try`: what a signal raises as a function begins would be lost.
    def steps() -> Generator[int, int, None]:
        try:
            while True:
                index = yield 0
                tell(columns[index].clone())
        except GeneratorExit:
            return
        except BaseException as error:  # no exception passes through the library
            errors.append(error)
        yield 1

    each = steps()
    next(each)
    told = _Told(each.send)
    # `ctypes.cast` would let it refer to itself, and what `tell` holds live until garbage is collected.
    call.told = ctypes.c_void_p.from_buffer(told).value
    try:
        yield
    finally:
        call.told = None
    if errors:
        raise errors[0]
