"""The kernels: implementations of ops for one device each, in order of preference."""

from __future__ import annotations

from slipstream.ops.bind import Kernel

__all__ = ["KERNELS"]

KERNELS: tuple[Kernel, ...] = ()
"""Every kernel; where none accepts, an op runs its reference."""
