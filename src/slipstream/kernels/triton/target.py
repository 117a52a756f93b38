"""What the kernels are compiled for, and what each compiled form must hold to."""

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
    """How one shape bucket of a kernel is launched.

    Attributes:
        sizes: Values of the kernel's own constants, by name.
        warps: Warps per program.
        stages: Depth of the software pipeline.
    """

    sizes: Mapping[str, int]
    warps: int = 4
    stages: int = 1

    def options(self) -> dict[str, int]:
        """The keywords of a launch."""
        return {**self.sizes, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Bucket:
    """Shapes of one kernel that are launched alike.

    Attributes:
        kernel: The first key into a table.
        shape: The second: what of the shapes decides, as text ("int4, 1 row, norm").
        choices: Values that a tuner may try for each of the kernel's sizes.
        warps: Numbers of warps that it may try.
        stages: Depths of the pipeline that it may try.
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
        name: Kernel and what is particular about this form.
        kernel: The jitted function.
        types: Triton's type of each argument by name ("*bf16", "i32"), or the value of a constant.
        launch: As the form is launched.
        divisible: Integers that are multiples of 16 when it is launched; pointers always are.
        registers: Most registers that a thread may use.
        wide_loads: Least number of 128-bit loads.
        needs: Instructions that must be in NVIDIA's machine code.
        targets: Names of what it is compiled for.
        bucket: Whose entry in a generation's table replaces `launch`, where there is one.
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
    """Whether Triton runs kernels by its interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; interpreted, a number that makes small cases take the ways of large ones."""
    return 8 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def generation(device: torch.device) -> int:
    """A GPU's compute capability as one number (80, 90); interpreted, 90."""
    major, minor = (9, 0) if interpreted() else torch.cuda.get_device_capability(device)
    return 10 * major + minor


def by_hand(generation: int, least: int = 80) -> bool:
    """Whether kernels may use NVIDIA's own instructions, those of compute capability `least` (80, 89, 90)."""
    return generation >= least and torch.version.hip is None and not interpreted()


def refuse(facts: Facts, *, dtypes: tuple[Any, ...]) -> str | None:
    """Why no kernel of this backend should be chosen, or None.

    Args:
        facts: As `bind` gives them.
        dtypes: That the kernel computes in.
    """
    if facts.dtype not in dtypes:
        return f"computes in {', '.join(str(d).removeprefix('torch.') for d in dtypes)}, not {facts.dtype}"
    return None
