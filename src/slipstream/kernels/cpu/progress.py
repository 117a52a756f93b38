"""Native calls of several steps that report the tokens of each step while they run the next one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from torch import Tensor

from slipstream.kernels.cpu.abi_model import ModelCall

__all__ = ["reporting"]

_Told = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)


@contextmanager
def reporting(call: ModelCall, tokens: Tensor, on_tokens: Callable[[Tensor], None]) -> Iterator[None]:
    """Make a call pass the tokens of each step but the last to `on_tokens`, on the calling thread.

    Args:
        call: To be run within the context.
        tokens: The buffer that the call fills, `(R, steps)`.
        on_tokens: Takes copies, `(R,)`. An error in it ends the call after the step that is running
            meanwhile, and is raised at the end of the context.
    """
    # Split here rather than between two steps, where caches are cold and slicing a column took 40 us.
    columns = tokens.unbind(1)
    errors: list[BaseException] = []

    # A generator resumes within its `try`; an exception that a signal raises as a function begins is lost.
    def steps() -> Generator[int, int, None]:
        try:
            while True:
                index = yield 0
                on_tokens(columns[index].clone())
        except GeneratorExit:
            return
        except BaseException as error:  # no exception passes through the library
            errors.append(error)
        yield 1

    each = steps()
    next(each)
    told = _Told(each.send)
    # `ctypes.cast` would create a reference cycle that keeps alive what `on_tokens` holds until the next GC.
    call.told = ctypes.c_void_p.from_buffer(told).value
    try:
        yield
    finally:
        call.told = None
    if errors:
        raise errors[0]
