"""Unpacks matrices to dense ones in one pass, for torch's product where there are many rows.

A weight is read once as it is stored and written once in the dtype that the matrix units take.

Shapes: I inputs, O outputs, G runs of bytes of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.decode import PARTS, RESCALE, codes_at, decoded, group_at, kind_of, name_of
from slipstream.kernels.triton.operands import Matrix, planes_of
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Bucket, Build, Launch, generation

__all__ = ["BUILDS", "build_of", "unpacked"]


@triton.jit
def _unpack(
    codes, second, third, multiplier, out, inputs, outputs, runs, stride,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, RESCALE: tl.constexpr,
    OUTPUTS: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    real = output < outputs
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    there = real[:, None] & (run < runs)[None, :]
    own = output[:, None, None] * stride
    first, other, high = codes_at(codes, second, own, run, there, inputs, WIDTH, FORMAT)
    whole = (tl.load(multiplier + output, mask=real, other=0.0) * RESCALE)[:, None, None]
    if FORMAT >= 3:
        group = run // BLOCKS
        scale, minimum = group_at(second, third, output, group, runs // BLOCKS, there, FORMAT)
    for part in tl.static_range(PARTS):
        weights = decoded(first, other, high, part, FORMAT)
        if FORMAT >= 3:
            weights = weights * scale[:, :, None]
        if FORMAT == 3:
            weights += minimum[:, :, None]
        at = run[None, :, None] * (PARTS * WIDTH) + part * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        place = out + output[:, None, None] * inputs + at
        tl.store(place, (weights * whole).to(out.dtype.element_ty), mask=there[:, :, None] & (at < inputs))


def _runs_of_group(kind: int, blocks: int) -> int:
    """Return the number of runs in a group of some blocks of 32 inputs; here a run of fp6 holds 64 inputs."""
    return max(2 * blocks // PARTS[kind], 1)


def _form(kind: int) -> tuple[Bucket, Launch]:
    choices = {"OUTPUTS": (1, 2, 4, 8), "RUNS": (16, 32, 64, 128)}
    launch = Launch({"OUTPUTS": 4, "RUNS": 64 if kind < 5 else 32, "WIDTH": 16}, warps=4)
    return Bucket("unpack", name_of(kind), choices), launch


def _launch(planes: list[Tensor], kind: int, blocks: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    outputs, inputs = shape
    codes = planes[0]
    launch = launched(*_form(kind), generation(codes.device))
    out = torch.empty(outputs, inputs, dtype=dtype, device=codes.device)
    stride = codes.shape[-1] // (2 if kind >= 5 else 1)
    runs = -(-inputs // 16) if kind <= 2 else stride // 16
    grid = (triton.cdiv(outputs, launch.sizes["OUTPUTS"]), triton.cdiv(runs, launch.sizes["RUNS"]))
    _unpack[grid](
        *planes_of(planes, kind),
        out,
        *(inputs, outputs, runs, stride),
        FORMAT=kind,
        PARTS=PARTS[kind],
        BLOCKS=_runs_of_group(kind, blocks),
        RESCALE=RESCALE[kind],
        **launch.options(),
    )
    return out


_unpacked = operator(
    "unpack(Tensor[] planes, int kind, int blocks, int[] shape, ScalarType dtype) -> Tensor",
    _launch,
    lambda planes, kind, blocks, shape, dtype: planes[0].new_empty(shape, dtype=dtype),
)


def unpacked(matrix: Matrix, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return the dense matrix `(O, I)` of a packed one."""
    shape = [matrix.outputs, inputs]
    return _unpacked(matrix.planes, matrix.kind, matrix.blocks, shape, dtype)  # type: ignore[no-any-return]


def build_of(name: str) -> Build:
    """Return the build for a format."""
    kind, blocks = kind_of(name) or (0, 1)
    types = {"codes": "*u8", "second": "*u8" if kind >= 5 else "*fp16", "third": "*fp16"}
    types |= {"multiplier": "*fp32", "out": "*bf16"}
    types |= dict.fromkeys(("inputs", "outputs", "runs", "stride"), "i32")
    constants = {"FORMAT": kind, "PARTS": PARTS[kind], "RESCALE": RESCALE[kind]}
    constants["BLOCKS"] = _runs_of_group(kind, blocks)
    divisible = frozenset({"inputs", "outputs", "runs", "stride"})
    bucket, launch = _form(kind)
    return Build(
        f"unpack, {name}", _unpack, types | constants, launch, divisible, wide_loads=1, bucket=bucket
    )


BUILDS = tuple(build_of(name) for name in ("int8", "fp8", "int4", "fp6"))
