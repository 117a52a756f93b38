"""The CPU kernels: one C++ library, loaded by ctypes, with one compilation unit per instruction set."""

from __future__ import annotations

from slipstream.kernels.cpu import attention, draw, linear, moe, norm, paged_attention
from slipstream.kernels.cpu import feed_forward as feed
from slipstream.ops.bind import Kernel

__all__ = ["KERNELS"]

KERNELS: tuple[Kernel, ...] = (
    *linear.KERNELS,
    *feed.KERNELS,
    *moe.KERNELS,
    *norm.KERNELS,
    *attention.KERNELS,
    *paged_attention.KERNELS,
    *draw.KERNELS,
)
"""All CPU kernels; for each op the best instruction set comes first."""
