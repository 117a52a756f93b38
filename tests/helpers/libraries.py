"""The native library of a given instruction set."""

from __future__ import annotations

import pytest

from slipstream.kernels.cpu.library import Library, load

__all__ = ["library"]


def library(isa: str) -> Library:
    """Return the library of an instruction set; skip the test if the machine does not support it."""
    found = load(isa)
    if found is None:
        pytest.skip(f"this machine has no {isa}")
    return found
