"""The kernels: implementations of ops for one device each, in order of preference."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from slipstream.devices import Device
from slipstream.kernels import cpu
from slipstream.kernels.cpu.encoder_decoder import NativeListener
from slipstream.kernels.cpu.encoder_decoder import bind_listener as bind_cpu_listener
from slipstream.kernels.cpu.library import torch_alone
from slipstream.kernels.cpu.memory import PASSES
from slipstream.kernels.cpu.model import bind_model
from slipstream.kernels.cpu.pack import bind_pack, bind_pack_into
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.kernels.cpu.stack import bind_encoder as bind_cpu_encoder
from slipstream.kernels.cpu.stack import bind_stack as bind_cpu_stack
from slipstream.ops.bind import Bound, Kernel

__all__ = [
    "PASSES",
    "bind_encoder",
    "bind_listener",
    "bind_model",
    "bind_pack",
    "bind_pack_into",
    "bind_stack",
    "kernels_for",
    "torch_alone",
]


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


def bind_stack(device: Device, blocks: Sequence[Any], otherwise: Any) -> Bound:
    """Choose what runs all blocks of an engine.

    Args:
        device: Where the engine runs.
        blocks: The layers in order.
        otherwise: `model.frame.run_stack`, which every device can run.
    """
    if device.name == "cpu":
        return bind_cpu_stack(blocks, otherwise)
    if not kernels_for(device):
        return Bound("stack", "reference", otherwise)
    from slipstream.kernels.triton.stack import bind_stack as bind_triton_stack

    return bind_triton_stack(blocks, otherwise)


def bind_encoder(device: Device, blocks: Sequence[Any], otherwise: Any, stack: Bound) -> NativeStack | None:
    """What runs layers together where there is no cache: the stack, or one of those layers that have one."""
    if device.name != "cpu":
        return None
    return stack.run if isinstance(stack.run, NativeStack) else bind_cpu_encoder(blocks, otherwise)


def bind_listener(device: Device, frame: Any, blocks: Sequence[Any], otherwise: Any) -> NativeListener | None:
    """What runs whole steps of a decoder that listens to an encoder; None where its parts run one by one."""
    return bind_cpu_listener(frame, blocks, otherwise) if device.name == "cpu" else None
