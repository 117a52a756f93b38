"""The native library as one instruction set has it."""

from __future__ import annotations

import pytest

from slipstream.kernels.cpu.library import Library, load

__all__ = ["library"]


def library(isa: str) -> Library:
    """The library of an instruction set; the test is skipped where the machine has it not."""
    found = load(isa)
    if found is None:
        pytest.skip(f"this machine has no {isa}")
    return found
