"""The GPU's kernels, in Triton. Importing this package needs Triton; `slipstream.kernels` asks first.

Within a kernel's file: the jitted functions, what launches them, the operator it is registered as, `KERNELS`
(what binding may choose) and `BUILDS` (the forms that are compiled ahead of time, and what each must hold
to).
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
"""Every kernel of the GPU, in order of preference."""

BUILDS: tuple[Build, ...] = tuple(build for module in _COMPILED for build in module.BUILDS)
"""Every form that is compiled ahead of time."""
