"""`activation` on the GPU: plain or gated, in one pass.

Shapes: T packed tokens, F feed-forward width.
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
from slipstream.ops.activation import KINDS, activate
from slipstream.ops.bind import Kernel

__all__ = ["BUILDS", "KERNELS", "activation", "apply", "gate"]


@triton.jit
def apply(x, KIND: tl.constexpr):
    """Return `f(x)` of a float32 block."""
    if KIND == 0:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 1:
        x = x * tl.sigmoid(
            1.5957691216057308 * (x + 0.044715 * x * x * x)
        )  # (1 + tanh(y)) / 2 = sigmoid(2 y)
    elif KIND == 2:
        x = x * tl.sigmoid(1.702 * x)
    elif KIND == 3:
        x = x * tl.sigmoid(x)
    elif KIND == 4:
        x = tl.maximum(x, 0.0)
    elif KIND == 5:
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == 6:
        x = tl.minimum(tl.maximum(x, 0.0), 6.0)
    elif KIND == 7:
        x = tl.where(x < 0.0, 0.01 * x, x)
    elif KIND == 8:
        grown = tl.exp(tl.minimum(x, 20.0))
        square = grown * (grown + 2.0)
        x = x * (square / (square + 2.0))
    elif KIND == 9:
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    elif KIND == 10:
        x = tl.sigmoid(x)
    return x


@triton.jit
def gate(x, up, KIND: tl.constexpr):
    """Return `f(x) * up` of float32 blocks."""
    if KIND == 12:
        x = tl.minimum(x, 7.0)
        y = (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0) * (x * tl.sigmoid(1.702 * x))
    else:
        y = apply(x, KIND) * up
    return y


@triton.jit
def _activate_rows(x, out, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if GATED:
        y = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        y = gate(y, up, KIND)
    else:
        y = apply(tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


_LAUNCH = Launch({"BLOCK": 1024}, warps=4)


def _bucket(gated: bool) -> Bucket:
    return Bucket("activation", "gated" if gated else "plain", {"BLOCK": (512, 1024, 2048, 4096)})


def _launch(x: Tensor, kind: int, gated: bool) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1] // (2 if gated else 1)
    out = x.new_empty(*x.shape[:-1], width)
    rows = out.numel() // max(width, 1)
    if rows:
        launch = launched(_bucket(gated), _LAUNCH, generation(x.device))
        grid = (rows, triton.cdiv(width, launch.sizes["BLOCK"]))
        _activate_rows[grid](x, out, width, KIND=kind, GATED=gated, **launch.options())
    return out


_activation = operator(
    "activation(Tensor x, int kind, bool gated) -> Tensor",
    _launch,
    lambda x, kind, gated: x.new_empty(*x.shape[:-1], x.shape[-1] // (2 if gated else 1)),
)


def activation(x: Tensor, *, name: str, gated: bool) -> Tensor:
    """Compute `ops.activation`."""
    if name not in KINDS:
        return activate(x, name=name, gated=gated)
    return _activation(x, KINDS[name], gated)  # type: ignore[no-any-return]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

KERNELS = (Kernel("activation", "triton", "cuda", functools.partial(refuse, dtypes=_DTYPES), activation),)

_TYPES = {"x": "*bf16", "out": "*bf16", "width": "i32"}
BUILDS = (
    Build(
        "activation, silu, gated",
        _activate_rows,
        {**_TYPES, "KIND": KINDS["silu"], "GATED": True},
        _LAUNCH,
        frozenset({"width"}),
        registers=40,
        wide_loads=2,
        bucket=_bucket(True),
    ),
    Build(
        "activation, gelu",
        _activate_rows,
        {**_TYPES, "KIND": KINDS["gelu"], "GATED": False},
        _LAUNCH,
        frozenset({"width"}),
        registers=48,
        wide_loads=1,
        bucket=_bucket(False),
    ),
)
