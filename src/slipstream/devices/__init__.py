"""The kinds of device, one per file; `choose` picks the one that an engine runs on."""

from __future__ import annotations

import torch

from slipstream.devices.cpu import CpuDevice
from slipstream.devices.cuda import CudaDevice
from slipstream.devices.device import Device, Lane, MemoryUse
from slipstream.devices.null import NullDevice

__all__ = ["CpuDevice", "CudaDevice", "Device", "Lane", "MemoryUse", "NullDevice", "choose"]


def choose(local_rank: int = 0) -> Device:
    """Return this process's GPU if torch has CUDA, else the CPU."""
    return CudaDevice(local_rank) if torch.cuda.is_available() else CpuDevice()
