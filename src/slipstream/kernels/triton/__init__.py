"""The GPU kernels, in Triton. Importing this package requires Triton; `slipstream.kernels` checks for it.

A kernel's file contains the jitted functions, the function that launches them, the torch operator as which it
is registered, `KERNELS` (what binding may choose) and `BUILDS` (the forms that are compiled ahead of time,
with the requirements on each).
"""

from __future__ import annotations

from slipstream.kernels.triton import (
    activation,
    argmax,
    attention,
    decode_attention,
    draw,
    fp8_rows,
    linear,
    matmul,
    moe,
    norm,
    one_row,
    rope,
    rope_cache,
    unpack,
)
from slipstream.kernels.triton.target import Build
from slipstream.ops.bind import Kernel

__all__ = ["BUILDS", "KERNELS"]

_MODULES = (activation, attention, argmax, draw, linear, moe, norm, rope, rope_cache)
_COMPILED = (
    activation,
    attention,
    argmax,
    decode_attention,
    draw,
    one_row,
    fp8_rows,
    matmul,
    norm,
    rope,
    rope_cache,
    unpack,
)

KERNELS: tuple[Kernel, ...] = tuple(kernel for module in _MODULES for kernel in module.KERNELS)
"""All GPU kernels, in order of preference."""

BUILDS: tuple[Build, ...] = tuple(build for module in _COMPILED for build in module.BUILDS)
"""All forms that are compiled ahead of time."""
