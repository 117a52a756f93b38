"""The activations of the feed-forward, plain and gated, by the names that transformers' configs use.

Shapes: T packed tokens, F feed-forward width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.bind import Case, Op

__all__ = ["ACTIVATIONS", "KINDS", "LEARNED", "OP", "activate", "deviations_at", "sparse", "xielu"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu_accurate(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_python": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "gelu_python_tanh": _gelu_tanh,
        "gelu_fast": _gelu_fast,
        "gelu_accurate": _gelu_accurate,
        "quick_gelu": _quick_gelu,
        "silu": F.silu,
        "swish": F.silu,
        "relu": F.relu,
        "relu2": _relu_squared,
        "relu6": F.relu6,
        "leaky_relu": F.leaky_relu,
        "mish": F.mish,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "linear": torch.clone,
    }
)
"""Activation functions by name. A family declines a layer whose activation is not in this table."""

LEARNED = frozenset({"xielu"})
"""Activations with learned parameters."""

KINDS: Mapping[str, int] = MappingProxyType(
    {
        "gelu": 0,
        "gelu_python": 0,
        "gelu_new": 1,
        "gelu_pytorch_tanh": 1,
        "gelu_python_tanh": 1,
        "gelu_fast": 1,
        "gelu_accurate": 1,
        "quick_gelu": 2,
        "silu": 3,
        "swish": 3,
        "relu": 4,
        "relu2": 5,
        "relu6": 6,
        "leaky_relu": 7,
        "mish": 8,
        "tanh": 9,
        "sigmoid": 10,
        "linear": 11,
        "swiglu_oai": 12,
    }
)
"""The number of each activation in compiled kernels; the last one exists only gated."""

_OAI_LIMIT = 7.0
_OAI_ALPHA = 1.702


def activate(x: Tensor, *, name: str, gated: bool) -> Tensor:
    """Apply the feed-forward's activation.

    Plain: `f(x)`. Gated: `f(gate) * up` with `gate, up` the halves of the last dimension. "swiglu_oai" is
    GPT-OSS's `(clamp(up) + 1) * gate' * sigmoid(1.702 gate')` with `gate' = min(gate, 7)` and `up` clamped to
    [-7, 7].

    Source: Shazeer 2020 (arXiv 2002.05202), eq. 5-6.

    Args:
        x: `(..., F)`, or `(..., 2F)` if gated.
        name: A key of `ACTIVATIONS`, or "swiglu_oai".
        gated: Whether `x` holds a gate and an up half.

    Returns:
        `(..., F)` in the dtype of `x`.
    """
    if not gated:
        return ACTIVATIONS[name](x)
    gate, up = x.chunk(2, dim=-1)
    if name == "swiglu_oai":
        gate, up = gate.clamp(max=_OAI_LIMIT), up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * _OAI_ALPHA))
    return ACTIVATIONS[name](gate) * up


def sparse(x: Tensor, sparsity: float, *, gated: bool) -> Tensor:
    """Zero what lies below a quantile of the gate, and subtract the quantile from the rest.

    The quantile is that of a normal distribution with the mean and the deviation of the token's values.

    Args:
        x: `(T, F)`, or `(T, 2 F)` with the gate first if `gated`.
        sparsity: Share of such a distribution below the quantile, less than 1; 0 returns `x`.
        gated: See `x`.

    Returns:
        Of the shape of `x`.
    """
    if sparsity == 0.0:
        return x
    gate, *up = x.chunk(2, dim=-1) if gated else (x,)
    std = torch.std(gate, dim=-1, keepdim=True, unbiased=False)
    least = gate.mean(dim=-1, keepdim=True) + std * deviations_at(sparsity, x.dtype)
    return torch.cat([F.relu(gate - least), *up], dim=-1)


@functools.cache
def deviations_at(sparsity: float, dtype: torch.dtype) -> float:
    """Return the quantile of the standard normal distribution at `sparsity`, rounded to a dtype."""
    share = torch.tensor(sparsity, dtype=torch.float32, device="cpu")
    return float(torch.special.ndtri(share).to(dtype))


def xielu(x: Tensor, learned: Tensor) -> Tensor:
    """Apply xIELU, `a x^2 + b x` above zero and `(expm1(x) - x) c + b x` below.

    Source: Huang and Schlag 2024 (arXiv 2411.13010), eq. 8, with `b = 0.5`, `a = softplus(learned[0])` and
    `c = b + softplus(learned[1])`.

    Args:
        x: `(T, F)`.
        learned: `(2,)`.

    Returns:
        `(T, F)` in the dtype of `x`.
    """
    above, below = F.softplus(learned).to(x.dtype)
    grown = above * x * x + _XIELU_BETA * x
    bounded = torch.expm1(x.clamp(max=_XIELU_EPS)) - x
    return torch.where(x > 0, grown, bounded * (_XIELU_BETA + below) + _XIELU_BETA * x)


_XIELU_BETA = 0.5
_XIELU_EPS = -1e-6


def _case(name: str, rows: int, width: int, *, gated: bool) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        x = 4 * torch.randn(rows, width * (2 if gated else 1), generator=generator)
        return {"x": x.to(dtype), "name": name, "gated": gated}

    return Case(f"{name}, {'gated' if gated else 'plain'}, {rows} x {width}", make)


OP = Op(
    "activation",
    activate,
    (
        *(_case(name, 3, 37, gated=False) for name in ACTIVATIONS),
        *(
            _case(name, 2, 64, gated=True)
            for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "swiglu_oai")
        ),
        _case("silu", 1, 1, gated=True),
    ),
)
