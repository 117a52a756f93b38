"""Launches that overlap: a kernel is let in before its predecessor has ended, and waits for it inside.

Every kernel that is launched so must wait before it reads or writes what others have to do with; then all of
its predecessor's predecessors have ended too, for that one has waited for them. A captured graph keeps the
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
    """Whether launches overlap on a GPU of this compute capability (80, 90): since Hopper."""
    return generation >= 90 and torch.version.hip is None and not interpreted()


def overlapping(generation: int) -> dict[str, bool]:
    """What a launch says where it may begin before its predecessor has ended."""
    return {"launch_pdl": True} if overlaps(generation) else {}


@triton.jit
def wait_for_predecessor(OVERLAPS: tl.constexpr):
    """Wait until the kernels before this one have ended, and what they wrote can be read."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_in(OVERLAPS: tl.constexpr):
    """Let the next kernel's programs begin where there is room, which wait for this one to end.

    For kernels that leave most processors idle; of others the end lets the next one in.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
