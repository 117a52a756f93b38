"""The rotary embedding of queries and keys, from a table of cosines and sines.

Shapes: T packed tokens, H heads, D head dim, R rotated dims (R <= D).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.ops.bind import Case, Op
from slipstream.spec import Rope

__all__ = ["OP", "both_tables", "half_tables", "rope"]


def both_tables(angles: Any) -> tuple[Tensor, Tensor]:
    """Return cosines and sines from a rotary module's output: two tensors, or one of `cos + i sin`."""
    if isinstance(angles, Tensor) and angles.is_complex():
        return angles.real, angles.imag
    cos, sin = angles
    return cos, sin


def half_tables(cos: Tensor, sin: Tensor, spec: Rope) -> tuple[Tensor, Tensor]:
    """Return tables with each angle once, `(..., R / 2)`, from tables in the layout `spec.table`."""
    cos, sin = (_half(table, spec.table) for table in (cos, sin))
    return cos, -sin if spec.backwards else sin


def _half(table: Tensor, layout: Literal["halves", "pairs", "half"]) -> Tensor:
    if layout == "half":
        return table
    return table[..., ::2] if layout == "pairs" else table[..., : table.shape[-1] // 2]


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the leading `R` dims of every head; the other dims are unchanged.

    `(a, b) -> (a cos - b sin, b cos + a sin)` for each pair, computed in float32.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 34.

    Args:
        x: `(T, H, D)`.
        cos: `(T, R / 2)`, each angle once.
        sin: `(T, R / 2)`.
        interleaved: The two dims of a pair are adjacent, rather than `R / 2` apart.

    Returns:
        `(T, H, D)`, a new tensor in the dtype of `x`.
    """
    dim = 2 * cos.shape[-1]
    rotated, unrotated = x[..., :dim].float(), x[..., dim:]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, unrotated), dim=-1) if unrotated.shape[-1] else rotated


def _case(name: str, tokens: int, heads: int, dim: int, rotated: int, *, interleaved: bool) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
        angles = 100 * torch.rand(tokens, rotated // 2, generator=generator)
        return {"x": x, "cos": angles.cos(), "sin": angles.sin(), "interleaved": interleaved}

    return Case(name, make)


OP = Op(
    "rope",
    rope,
    (
        _case("halves, whole head", 5, 4, 64, 64, interleaved=False),
        _case("halves, part of the head", 3, 2, 64, 16, interleaved=False),
        _case("pairs, whole head", 7, 3, 32, 32, interleaved=True),
        _case("pairs, part of the head", 1, 1, 48, 20, interleaved=True),
        _case("two dims", 2, 5, 8, 2, interleaved=False),
    ),
)
