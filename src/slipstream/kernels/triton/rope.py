"""`rope` on the GPU: a program rotates some heads of one token.

Shapes: T packed tokens, H heads, D head dim, R rotated dims.
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

__all__ = ["BUILDS", "KERNELS", "build_of"]


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def _rotate(
    x, cos, sin, out, heads, stride,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    # Each dim is rotated by its angle together with its partner; dims beyond the rotated ones stay as is.
    rotated = dim < 2 * HALF
    if INTERLEAVED:
        angle = dim // 2
        partner = tl.where(dim % 2 == 0, dim + 1, dim - 1)
        first = dim % 2 == 0
    else:
        angle = dim % HALF
        partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
        first = dim < HALF
    inside = (head < heads)[:, None] & (dim < DIM)[None, :]
    base = token * stride + head[:, None] * DIM
    a = tl.load(x + base + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + base + partner[None, :], mask=inside & rotated[None, :], other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + angle, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + token * HALF + angle, mask=rotated, other=0.0).to(tl.float32)
    y = a * c[None, :] + b * tl.where(first, -s, s)[None, :]
    y = tl.where(rotated[None, :], y, a)
    place = (token * heads + head[:, None]) * DIM + dim[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def _form(heads: int, dim: int) -> tuple[Bucket, Launch]:
    dims, padded = triton.next_power_of_2(dim), triton.next_power_of_2(heads)
    launch = Launch({"HEADS": min(padded, max(2048 // dims, 1)), "DIMS": dims}, warps=4)
    return Bucket("rope", f"{padded} x {dims}", {"HEADS": (1, 2, 4, 8, 16, 32)}), launch


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    tokens, heads, dim = x.shape
    # q, k and v may be parts of one tensor: the heads of a token are contiguous, tokens are not.
    if x.stride()[1:] != (dim, 1):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        launch = launched(*_form(heads, dim), generation(x.device))
        _rotate[(tokens, triton.cdiv(heads, launch.sizes["HEADS"]))](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            heads,
            x.stride(0),
            DIM=dim,
            HALF=cos.shape[-1],
            INTERLEAVED=interleaved,
            **launch.options(),
        )
    return out


_rope = operator(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    _launch,
    lambda x, cos, sin, interleaved: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)


def _run(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    return _rope(x, cos, sin, interleaved)  # type: ignore[no-any-return]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

KERNELS = (Kernel("rope", "triton", "cuda", functools.partial(refuse, dtypes=_DTYPES), _run),)


def build_of(heads: int, dim: int, half: int, interleaved: bool) -> Build:
    """Return the build for some heads, of which `2 * half` dims are rotated."""
    types = {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*bf16", "heads": "i32", "stride": "i32"}
    bucket, launch = _form(heads, dim)
    return Build(
        f"rope, {heads} heads of {dim}, {'pairs' if interleaved else 'halves'}",
        _rotate,
        {**types, "DIM": dim, "HALF": half, "INTERLEAVED": interleaved},
        launch,
        frozenset({"stride"}),
        registers=128,
        wide_loads=1,
        bucket=bucket,
    )


BUILDS = (build_of(32, 128, 64, False), build_of(8, 64, 32, False), build_of(16, 64, 32, True))
