"""The kernels: implementations of ops for one device each, in order of preference."""

from __future__ import annotations

import importlib.util

from slipstream.devices import Device
from slipstream.kernels import cpu
from slipstream.kernels.cpu.model import bind_model
from slipstream.kernels.cpu.pack import bind_pack
from slipstream.kernels.cpu.stack import bind_stack
from slipstream.ops.bind import Kernel

__all__ = ["bind_model", "bind_pack", "bind_stack", "kernels_for"]


def kernels_for(device: Device) -> tuple[Kernel, ...]:
    """Every kernel of a device; where none accepts, an op runs its reference.

    Args:
        device: Where the engine runs. The GPU's kernels are only there where Triton is installed; a null
            device has none, for it records what torch dispatches, and a native library's calls are not.
    """
    if device.name == "cpu":
        return cpu.KERNELS
    if device.name != "cuda" or importlib.util.find_spec("triton") is None:
        return ()
    from slipstream.kernels import triton

    return triton.KERNELS
