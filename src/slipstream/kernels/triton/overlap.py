"""Overlapping launches: a kernel may start before its predecessor has ended, and then waits for it.

Every kernel that is launched this way must wait before it reads or writes memory that other kernels use; then
all earlier kernels have ended too, since the predecessor has waited for them. A captured graph keeps the
overlap.

Source: NVIDIA CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA,
`griddepcontrol`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.kernels.triton.target import interpreted

__all__ = ["let_in", "overlapping", "overlaps", "wait_for_predecessor"]


def overlaps(generation: int) -> bool:
    """Whether launches overlap on a GPU of this compute capability (80, 90): from Hopper on."""
    return generation >= 90 and torch.version.hip is None and not interpreted()


def overlapping(generation: int) -> dict[str, bool]:
    """Return the launch options that let a kernel begin before its predecessor has ended."""
    return {"launch_pdl": True} if overlaps(generation) else {}


@triton.jit
def wait_for_predecessor(OVERLAPS: tl.constexpr):
    """Wait until the kernels before this one have ended, and what they wrote can be read."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_in(OVERLAPS: tl.constexpr):
    """Let the next kernel's programs start where there is room; they wait for this kernel to end.

    For kernels that leave most multiprocessors idle; other kernels let the next one in by ending.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
