"""Passes over whole tensors at memory bandwidth: a copy past the caches, a search for NaN, a digest."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from slipstream.config.environment import cpu_isa
from slipstream.kernels.cpu.abi import DTYPES
from slipstream.kernels.cpu.library import Library, load, threads_of_torch
from slipstream.ops.memory import Passes

__all__ = ["PASSES", "copied", "digest", "is_finite"]

_LEAST_BYTES = 1 << 20
"""Minimum size: below it torch's own copy and sum take no longer."""


def copied(source: Tensor, target: Tensor) -> bool:
    """Copy a tensor in two thirds of torch's time and return True, or return False if torch must copy it.

    Args:
        source: Any tensor.
        target: Has the same shape; its memory is that of `source`, or does not overlap it.
    """
    library = _library()
    if library is None or target.nbytes < _LEAST_BYTES or source.dtype != target.dtype:
        return False
    same = source.shape == target.shape and source.stride() == target.stride()
    if not (same and _is_one_run(source) and _is_one_run(target)):
        return False
    status = library.handle.slipstream_copy(
        threads_of_torch(), source.data_ptr(), target.data_ptr(), target.nbytes
    )
    return bool(status == 0)


def is_finite(tensor: Tensor) -> bool | None:
    """Whether a tensor has neither NaN nor infinity; None if torch must check."""
    library = _library()
    if library is None or tensor.nbytes < _LEAST_BYTES or tensor.dtype not in DTYPES:
        return None
    if not _is_one_run(tensor):
        return None
    answer = ctypes.c_int32()
    status = library.handle.slipstream_finite(
        threads_of_torch(), tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype], ctypes.byref(answer)
    )
    return None if status else bool(answer.value)


def digest(tensor: Tensor) -> int | None:
    """Return a 64-bit number that changes with any byte of a tensor; None if its memory is not one run."""
    library = _library()
    if library is None or not _is_one_run(tensor):
        return None
    answer = ctypes.c_uint64()
    status = library.handle.slipstream_digest(
        threads_of_torch(), tensor.data_ptr(), tensor.nbytes, ctypes.byref(answer)
    )
    return None if status else answer.value


def _library() -> Library | None:
    """Return the baseline library, as memory is the bottleneck; None under SLIPSTREAM_CPU_ISA=reference."""
    return None if cpu_isa() == "reference" else load("baseline")


def _is_one_run(tensor: Tensor) -> bool:
    """Whether a tensor is on the CPU and its elements lie without gaps, in order or by columns."""
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not plain or tensor.is_neg() or tensor.is_conj():
        return False
    return tensor.is_contiguous() or (tensor.dim() > 1 and tensor.mT.is_contiguous())


PASSES = Passes(copied, is_finite)
