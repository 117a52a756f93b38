"""A GPU that is not there: the null device with the GPU's own kernels, interpreted.

An engine upon it runs every launch, every captured step and every choice of a kernel that one on a GPU does;
what it cannot show is memory, streams and time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import slipstream.engine.build
from slipstream.devices import NullDevice
from slipstream.kernels import triton

__all__ = ["rehearsing"]


class _Interpreted(NullDevice):
    """The null device by the name for which kernels are bound."""

    name = "cuda"


@contextmanager
def rehearsing() -> Iterator[None]:
    """Within, engines are built upon that device."""
    with pytest.MonkeyPatch.context() as patch:
        # Their tensors lie on the CPU, where the interpreter reads them.
        patch.setattr(triton, "KERNELS", tuple(replace(kernel, device="cpu") for kernel in triton.KERNELS))
        patch.setattr(slipstream.engine.build, "choose", lambda rank=0: _Interpreted())
        yield
