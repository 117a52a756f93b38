"""The kernels: implementations of ops, each for one device, in order of preference."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.devices import Device
from slipstream.kernels import cpu
from slipstream.kernels.cpu.binding import bind_encoder as bind_cpu_encoder
from slipstream.kernels.cpu.binding import bind_stack as bind_cpu_stack
from slipstream.kernels.cpu.encoder_decoder import NativeEncoderDecoder
from slipstream.kernels.cpu.encoder_decoder import bind_encoder_decoder as bind_cpu_encoder_decoder
from slipstream.kernels.cpu.library import load, refuse, torch_alone
from slipstream.kernels.cpu.memory import PASSES
from slipstream.kernels.cpu.model import bind_model
from slipstream.kernels.cpu.pack import bind_pack, bind_pack_into
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.ops.bind import Bound, Kernel

__all__ = [
    "PASSES",
    "bind_encoder",
    "bind_encoder_decoder",
    "bind_model",
    "bind_pack",
    "bind_pack_into",
    "bind_stack",
    "kernels_for",
    "torch_alone",
    "why_apart",
    "why_no_kernels",
]


def kernels_for(device: Device) -> tuple[Kernel, ...]:
    """Return all kernels of a device; an op that none of them accepts runs its reference implementation.

    Args:
        device: Where the engine runs. GPU kernels need Triton to be installed; a null device has none, since
            it records what torch dispatches and calls into a native library are not dispatched by torch.
    """
    if device.name == "cpu":
        return cpu.KERNELS
    if device.name != "cuda" or importlib.util.find_spec("triton") is None:
        return ()
    from slipstream.kernels import triton

    return triton.KERNELS


def why_no_kernels(device: Device) -> str | None:
    """Return why a device that kernels exist for has none, so that plain torch runs; None otherwise."""
    if device.name == "cpu":
        return None if load() is not None else refuse("avx2")
    if device.name == "cuda" and not kernels_for(device):
        return "Triton is not installed; pip install 'slipstream[gpu]'"
    return None


def bind_stack(device: Device, blocks: Sequence[Any], otherwise: Any) -> Bound:
    """Choose the implementation that runs all blocks of an engine.

    Args:
        device: Where the engine runs.
        blocks: The layers in order.
        otherwise: The fallback, `model.frame.run_stack`, which runs on every device.
    """
    if device.name == "cpu":
        return bind_cpu_stack(blocks, otherwise)
    if not kernels_for(device):
        return Bound("stack", "reference", otherwise)
    from slipstream.kernels.triton.stack import bind_stack as bind_triton_stack

    return bind_triton_stack(blocks, otherwise)


def why_apart(device: Device, stack: Bound, cache_dtype: torch.dtype | None = None) -> str | None:
    """Return why kernels do not run all layers of a step together; None if they do, or if there are none.

    Args:
        device: Where the layers run.
        stack: The implementation that was chosen for them.
        cache_dtype: Dtype of the KV cache; None for that of the layers.
    """
    if device.name != "cpu":
        return stack.refused.get("triton")
    if isinstance(stack.run, NativeStack):
        latents = any(block.spec.latent is not None for block in stack.run.blocks)
        return "latents in int8 are not supported" if latents and cache_dtype == torch.int8 else None
    library = load()
    return None if library is None else stack.refused.get(f"cpu-{library.isa}")


def bind_encoder(device: Device, blocks: Sequence[Any], otherwise: Any, stack: Bound) -> NativeStack | None:
    """Return the stack that runs several layers in one call without a KV cache, or None if there is none.

    This is `stack` itself where it is native, else a native stack of those blocks that the library supports.
    """
    if device.name != "cpu":
        return None
    return stack.run if isinstance(stack.run, NativeStack) else bind_cpu_encoder(blocks, otherwise)


def bind_encoder_decoder(
    device: Device, frame: Any, blocks: Sequence[Any], otherwise: Any
) -> NativeEncoderDecoder | None:
    """Return the runner of whole steps of an encoder-decoder's decoder; None if its parts run one by one."""
    return bind_cpu_encoder_decoder(frame, blocks, otherwise) if device.name == "cpu" else None
