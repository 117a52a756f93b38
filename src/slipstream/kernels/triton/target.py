"""What the kernels are compiled for, and the requirements on each compiled form."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from slipstream.ops.bind import Facts

__all__ = ["Bucket", "Build", "Launch", "by_hand", "generation", "interpreted", "processors", "refuse"]


@dataclass(frozen=True)
class Launch:
    """The launch parameters of one shape bucket of a kernel.

    Attributes:
        sizes: Values of the kernel's own constants, by name.
        warps: Warps per program.
        stages: Depth of the software pipeline.
    """

    sizes: Mapping[str, int]
    warps: int = 4
    stages: int = 1

    def options(self) -> dict[str, int]:
        """Return the keyword arguments of a launch."""
        return {**self.sizes, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Bucket:
    """Shapes of one kernel that share launch parameters.

    Attributes:
        kernel: The first key into a table.
        shape: The second key: the properties of the shapes that matter, as text ("int4, 1 row, norm").
        choices: Values that a tuner may try for each of the kernel's sizes.
        warps: Numbers of warps that a tuner may try.
        stages: Pipeline depths that a tuner may try.
    """

    kernel: str
    shape: str
    choices: Mapping[str, tuple[int, ...]] = field(compare=False)
    warps: tuple[int, ...] = (1, 2, 4, 8)
    stages: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Build:
    """One form of a kernel, to be compiled ahead of time on a machine without a GPU.

    Attributes:
        name: The kernel and the distinguishing properties of this form.
        kernel: The jitted function.
        types: Triton's type of each argument by name ("*bf16", "i32"), or the value of a constant.
        launch: The launch parameters of the form.
        divisible: Names of integer arguments that are multiples of 16 at launch; pointers always are.
        registers: Maximum number of registers per thread.
        wide_loads: Minimum number of 128-bit loads.
        needs: Instructions that must occur in NVIDIA's machine code.
        targets: Names of the targets that the form is compiled for.
        bucket: The bucket whose entry in a generation's table, if any, replaces `launch`.
    """

    name: str
    kernel: Any
    types: Mapping[str, Any]
    launch: Launch
    divisible: frozenset[str] = frozenset()
    registers: int = 255
    wide_loads: int = 0
    needs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("sm_80", "sm_90", "gfx942")
    bucket: Bucket | None = None


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def processors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; interpreted, few, so that small cases take all code paths."""
    return 8 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def generation(device: torch.device) -> int:
    """Return a GPU's compute capability as one number (80, 90); 90 where kernels are interpreted."""
    major, minor = (9, 0) if interpreted() else torch.cuda.get_device_capability(device)
    return 10 * major + minor


def by_hand(generation: int, least: int = 80) -> bool:
    """Whether kernels may use NVIDIA's instructions of compute capability `least` (80, 89, 90)."""
    return generation >= least and torch.version.hip is None and not interpreted()


def refuse(facts: Facts, *, dtypes: tuple[Any, ...]) -> str | None:
    """Return why a kernel of this backend should not be chosen, or None if it may be.

    Args:
        facts: As `bind` passes them.
        dtypes: The dtypes that the kernel computes in.
    """
    if facts.dtype not in dtypes:
        return f"computes in {', '.join(str(d).removeprefix('torch.') for d in dtypes)}, not {facts.dtype}"
    return None
