"""The kernels: implementations of ops for one device each, in order of preference."""

from __future__ import annotations

from slipstream.kernels import cpu
from slipstream.kernels.cpu.stack import bind_stack
from slipstream.ops.bind import Kernel

__all__ = ["KERNELS", "bind_stack"]

KERNELS: tuple[Kernel, ...] = cpu.KERNELS
"""Every kernel; where none accepts, an op runs its reference."""
