"""Many rows times an fp8 matrix by products of fp8: one launch rounds rows to e4m3, torch multiplies.

Only used where the user asked for rounded inputs (`quant.activation`). A row's scale is a power of two, so
that the values of its codes are exact in bfloat16, and rounding loses no more than the format itself does.

Source: as `ops.linear.Rounding`.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.operands import Matrix
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Bucket, Build, Launch, generation
from slipstream.kernels.triton.unpack import unpacked
from slipstream.ops.linear import Rounding, round_rows

__all__ = ["BUILDS", "build_of", "times_rounded"]

_FIRST_GENERATION = 89
"""Compute capability of the first GPUs that multiply fp8."""


@triton.jit
def _round_row(x, codes, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    odd = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        y = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(y))
        odd += y * 0.0
    most = tl.max(largest, 0)
    # The scale is the least power of two such that the largest becomes at most 448 = 1.75 * 2^8.
    bits = most.to(tl.uint32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.uint32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    counts = most >= 7.888609052210118e-31  # 2^-100: smaller rows count as zeros
    tl.store(scales + row, tl.where(counts, scale, 1.0) + tl.sum(odd, 0))
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        y = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        y = tl.where(counts, y * inverse, 0.0)
        tl.store(codes + row * width + column, y.to(tl.float8e4nv), mask=column < width)


_LAUNCH = Launch({"BLOCK": 2048}, warps=4)
_BUCKET = Bucket("rows to fp8", "any", {"BLOCK": (1024, 2048, 4096, 8192)})


def _launch(x: Tensor, planes: list[Tensor], bias: Tensor | None) -> Tensor:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    launch = launched(_BUCKET, _LAUNCH, generation(x.device))
    _round_row[(x.shape[0],)](x.contiguous(), codes, scales, x.shape[1], **launch.options())
    weights, rows = planes
    return torch._scaled_mm(
        codes,
        weights.view(torch.float8_e4m3fn).t(),
        scale_a=scales,
        scale_b=rows.view(1, -1),
        bias=bias,
        out_dtype=x.dtype,
    )


_fp8_linear = operator(
    "fp8_linear(Tensor x, Tensor[] planes, Tensor? bias) -> Tensor",
    _launch,
    lambda x, planes, bias: x.new_empty(x.shape[0], planes[0].shape[0]),
)


def times_rounded(x: Tensor, matrix: Matrix, rounding: Rounding) -> Tensor:
    """Round rows to fp8, multiply them by an fp8 matrix, and add its bias.

    This uses fp8 products where torch has them: from compute capability 8.9 on, in bfloat16, with widths that
    are multiples of 16; else the rounded rows are multiplied by the unpacked matrix.

    Args:
        x: `(T, I)`.
        matrix: `(O, I)` in fp8.
        rounding: The rounding to fp8.

    Returns:
        `(T, O)` in the dtype of x.
    """
    whole = x.shape[1] % 16 == 0 and matrix.outputs % 16 == 0
    if whole and x.dtype == torch.bfloat16 and generation(x.device) >= _FIRST_GENERATION:
        return _fp8_linear(x, matrix.planes, matrix.bias)  # type: ignore[no-any-return]
    rounded = round_rows(x, rounding).to(x.dtype)
    return F.linear(rounded, unpacked(matrix, x.shape[1], x.dtype), matrix.bias)


def build_of() -> Build:
    """Return the build for bfloat16 rows; GPUs before 8.9 have no cast to e4m3, and AMD's e4m3 differs."""
    types = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "width": "i32"}
    return Build(
        "rows to fp8",
        _round_row,
        types,
        _LAUNCH,
        frozenset({"width"}),
        registers=128,
        wide_loads=2,
        targets=("sm_90",),
        bucket=_BUCKET,
    )


BUILDS = (build_of(),)
