"""A feed-forward: two matrices with an activation between them.

Shapes: T packed tokens, C input width, F width between the matrices, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.ops.activation import activate
from slipstream.ops.bind import Case, Op
from slipstream.ops.linear import Weight, linear

__all__ = ["OP", "feed_forward"]


def feed_forward(
    x: Tensor, first: Weight, last: Weight, *, name: str, gated: bool, gate_last: bool = False
) -> Tensor:
    """Return `last` times the activation of `first` times `x`.

    Source: Shazeer 2020 (arXiv 2002.05202), eq. 5-6.

    Args:
        x: `(T, C)`, any floating dtype.
        first: `(F, C)`, or `(2F, C)` if gated.
        last: `(O, F)`.
        name: The activation, a name that `activate` accepts.
        gated: Whether the output of `first` consists of a gate and an up half.
        gate_last: Whether the gate is the second half.

    Returns:
        `(T, O)` in the dtype of `x`.
    """
    inner = linear(x, first)
    if gate_last:
        inner = torch.cat(inner.chunk(2, dim=-1)[::-1], dim=-1)
    return linear(activate(inner, name=name, gated=gated), last)


def _case(rows: int, widths: tuple[int, int, int], name: str, *, bias: bool = True, **options: bool) -> Case:
    inputs, inner, outputs = widths
    gated = options.get("gated", False)

    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        made = [
            _weight(o, i, generator, dtype, bias)
            for o, i in ((inner * (2 if gated else 1), inputs), (outputs, inner))
        ]
        return {"x": x, "first": made[0], "last": made[1], "name": name, "gated": gated, **options}

    kind = "".join(f", {option}" for option, on in options.items() if on)
    return Case(f"{name}{kind}, {rows} rows of {inputs} to {inner} to {outputs}", make)


def _weight(outputs: int, inputs: int, generator: torch.Generator, dtype: torch.dtype, bias: bool) -> Weight:
    matrix = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    b = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    unpack: Callable[..., Tensor] = lambda *_: matrix  # noqa: E731
    return Weight("plain", (outputs, inputs), (matrix,), unpack, b)


OP = Op(
    "feed_forward",
    feed_forward,
    (
        _case(1, (64, 96, 64), "gelu"),
        _case(3, (1, 1, 1), "relu", bias=False),
        _case(5, (77, 33, 101), "gelu_pytorch_tanh", bias=False),
        _case(65, (64, 70, 41), "silu", gated=True),
        _case(17, (40, 37, 8), "gelu", gated=True, gate_last=True),
        _case(131, (129, 65, 33), "gelu", gated=True, gate_last=True, bias=False),
        _case(65, (32, 48, 32), "swiglu_oai", gated=True),
        # More rows than are processed at once, and widths that need several passes.
        _case(577, (33, 130, 20), "quick_gelu"),
        _case(49, (24, 6500, 20), "gelu", gated=True),
    ),
)
