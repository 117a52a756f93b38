"""`norm` on the GPU: one program per row, which is read once, and optionally added to a residual.

Shapes: R rows, C width.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Bucket, Build, Launch, generation, refuse
from slipstream.ops.bind import Kernel
from slipstream.ops.norm import norm
from slipstream.spec import Norm

__all__ = ["BUILDS", "KERNELS", "WIDEST", "build_of", "norm_onto", "run_norm"]

WIDEST = 1 << 15
"""Maximum width of a row: a wider one does not fit into the registers of one program."""


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def _norm_rows(
    x, weight, bias, residual, out, width, weight_rows, eps, offset, factor,
    LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    y = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        y = tl.where(inside, y - tl.sum(y, 0) / width, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / width + eps)
    own = (row % weight_rows) * width + column
    if HAS_WEIGHT:
        y = y * (tl.load(weight + own, mask=inside, other=0.0).to(tl.float32) + offset)
    if HAS_BIAS:
        y = y + tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y = tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32) + factor * y
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def _form(width: int) -> tuple[Bucket, Launch]:
    block = triton.next_power_of_2(width)
    # 16 bytes per thread and load, with at most 16 warps.
    launch = Launch({"BLOCK": block}, warps=min(max(block // 256, 1), 16))
    return Bucket("norm", str(block), {}, warps=(1, 2, 4, 8, 16)), launch


def _launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    layer: bool,
    numbers: list[float],
) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // max(width, 1)
    if rows:
        present = weight if weight is not None else bias
        weight_rows = 1 if present is None else max(present.numel() // width, 1)
        _norm_rows[(rows,)](
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            width,
            weight_rows,
            *numbers,
            LAYER=layer,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            **launched(*_form(width), generation(x.device)).options(),
        )
    return out


_norm = operator(
    "norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, bool layer, float[] numbers) -> Tensor",
    _launch,
    lambda x, weight, bias, residual, layer, numbers: torch.empty_like(x),
)


def _fits(x: Tensor, vector: Tensor | None) -> bool:
    """Whether a weight or bias is None, or is contiguous with the shape of the last dimensions of `x`."""
    return vector is None or (vector.is_contiguous() and vector.shape == x.shape[x.dim() - vector.dim() :])


def run_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, spec: Norm) -> Tensor:
    """Compute `ops.norm`."""
    same = weight is None or bias is None or weight.shape == bias.shape
    if x.shape[-1] > WIDEST or not same or not _fits(x, weight) or not _fits(x, bias):
        return norm(x, weight, bias, spec=spec)
    return _norm(x, weight, bias, None, spec.kind == "layer", [spec.eps, spec.offset, 1.0])  # type: ignore[no-any-return]


def norm_onto(
    residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: Norm, factor: float
) -> Tensor:
    """Return `residual + factor * norm(x)`.

    Args:
        residual: `(R, C)`, contiguous.
        x: `(R, C)`, of at most `2^15` columns.
        weight: `(C,)` or None.
        bias: `(C,)` or None.
        spec: The norm.
        factor: Multiplies the norm's output.
    """
    return _norm(  # type: ignore[no-any-return]
        x, weight, bias, residual, spec.kind == "layer", [spec.eps, spec.offset, factor]
    )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

KERNELS = (Kernel("norm", "triton", "cuda", functools.partial(refuse, dtypes=_DTYPES), run_norm),)


def build_of(width: int, layer: bool) -> Build:
    """Return the build for rows of a width."""
    types = {
        "x": "*bf16",
        "weight": "*bf16",
        "bias": "*bf16",
        "residual": "*bf16",
        "out": "*bf16",
        "width": "i32",
        "weight_rows": "i32",
        "eps": "fp32",
        "offset": "fp32",
        "factor": "fp32",
        "LAYER": layer,
        "HAS_WEIGHT": True,
        "HAS_BIAS": layer,
        "HAS_RESIDUAL": layer,
    }
    name = f"norm, {'layer' if layer else 'rms'}, {width}"
    bucket, launch = _form(width)
    return Build(
        name,
        _norm_rows,
        types,
        launch,
        frozenset({"width"}),
        registers=64,
        wide_loads=1,
        bucket=bucket,
    )


BUILDS = (build_of(2048, False), build_of(4096, False), build_of(4096, True))
