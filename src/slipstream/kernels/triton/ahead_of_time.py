"""Compiles kernels for a GPU that is not present, and reads their costs from the machine code.

Source: NVIDIA CUDA Binary Utilities (`cuobjdump -res-usage`, `-sass`), which come with Triton; LLVM's AMDGPU
guide for the counts of AMD's kernels.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Build

__all__ = ["TARGETS", "Compiled", "compile_ahead", "faults"]

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
"""Backend, architecture and warp size by name: A100, H100 and H200, MI300."""

_SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
"""Maximum bytes of shared memory per program."""

_COUNTED = ("HGMMA", "QGMMA", "HMMA", "IMMA", "LDGSTS", "UTMALDG", "I2F", "BAR")
_WIDE = re.compile(r"\bLDG(?:STS)?\.[A-Z0-9.]*128")


@dataclass(frozen=True)
class Compiled:
    """The properties of one compiled form of a kernel.

    Attributes:
        build: The form.
        target: A key of `TARGETS`.
        registers: Registers per thread (on AMD the vector registers).
        spills: Loads and stores of spilled registers.
        stack: Bytes of stack.
        shared: Bytes of shared memory.
        wide_loads: Loads of 128 bits from global memory.
        instructions: Counts of the notable instructions, by name.
    """

    build: Build
    target: str
    registers: int
    spills: int
    stack: int
    shared: int
    wide_loads: int
    instructions: dict[str, int]


def compile_ahead(build: Build, target: str) -> Compiled:
    """Compile one form for one target.

    Args:
        build: What to compile.
        target: A key of `TARGETS`.
    """
    names, launch = build.kernel.arg_names, build.launch
    if build.bucket is not None and target.startswith("sm_"):
        launch = launched(build.bucket, launch, int(target.removeprefix("sm_")))
    constants = {**{n: v for n, v in build.types.items() if not isinstance(v, str)}, **launch.sizes}
    signature = {n: "constexpr" if n in constants else build.types[n] for n in names}
    aligned = [n for n in names if signature[n].startswith("*") or n in build.divisible]
    source = ASTSource(
        fn=build.kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    stages = min(launch.stages, 2) if target.startswith("gfx") else launch.stages
    options = {"num_warps": launch.warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    read = _read_amd if target.startswith("gfx") else _read_nvidia
    return read(build, target, compiled)


def _read_nvidia(build: Build, target: str, compiled: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))
    usage_match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if usage_match is None:
        raise RuntimeError(f"cuobjdump says nothing of {build.name}: {usage[:200]}")
    count = {name: len(re.findall(rf"\b{name}\b", code)) for name in (*_COUNTED, "LDL", "STL")}
    return Compiled(
        build,
        target,
        registers=int(usage_match[1]),
        spills=count.pop("LDL") + count.pop("STL"),
        stack=int(usage_match[2]),
        shared=compiled.metadata.shared,
        wide_loads=len(_WIDE.findall(code)),
        instructions={name: n for name, n in count.items() if n},
    )


def _cuobjdump(option: str, file: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, option, file], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _read_amd(build: Build, target: str, compiled: Any) -> Compiled:
    code = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        return int(found[1]) if found else 0

    matrix = len(re.findall(r"\bv_mfma_", code))
    return Compiled(
        build,
        target,
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count"),
        stack=number("private_segment_fixed_size"),
        shared=compiled.metadata.shared,
        wide_loads=len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", code)),
        instructions={"MFMA": matrix} if matrix else {},
    )


def faults(compiled: Compiled) -> list[str]:
    """Return the requirements that a compiled form violates, one phrase each."""
    build, target, violations = compiled.build, compiled.target, []
    if compiled.spills or compiled.stack:
        violations.append(f"spills {compiled.spills} times, {compiled.stack} bytes of stack")
    if compiled.shared > _SHARED[target]:
        violations.append(f"{compiled.shared} bytes of shared memory are more than {_SHARED[target]}")
    if target.startswith("gfx"):  # the other requirements are about NVIDIA's machine code
        return violations
    if compiled.registers > build.registers:
        violations.append(f"{compiled.registers} registers are more than {build.registers}")
    if compiled.wide_loads < build.wide_loads:
        violations.append(f"{compiled.wide_loads} loads of 128 bits are fewer than {build.wide_loads}")
    violations += [f"no {name}" for name in build.needs if name not in compiled.instructions]
    return violations
