"""Multi-head latent attention: keys and values of all heads are projections of one short vector per token.

That vector (after its norm) and one rotated key, which all heads share, are all that a cache keeps:
`kv_rank + rope_dim` numbers per token and layer. Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.

Shapes: B batch, T packed tokens, L keys, H heads, D head dim (unrotated, then rotated), R latent width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.ops.attention import attention
from slipstream.spec import Latent

__all__ = ["absorbed", "expanded", "queries_and_latents"]

Project = Callable[[str, Tensor], Tensor]
"""A linear or a norm of the block by what it is called in `queries_and_latents`."""


def queries_and_latents(
    x: Tensor, latent: Latent, project: Project, rotate: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer's attention is made of.

    Args:
        x: `(T, C)`.
        latent: The widths.
        project: Applies "queries", "latents" and "norm".
        rotate: Applies the rotary embedding to `(T, heads, rope_dim)`.

    Returns:
        Queries `(T, H, D)`, latents `(T, 1, R)` and the shared rotated keys `(T, 1, rope_dim)`.
    """
    q = project("queries", x).unflatten(-1, (-1, latent.plain_dim + latent.rope_dim))
    q = q if latent.query_scale == 1.0 else q * latent.query_scale
    plain, turned = q.split((latent.plain_dim, latent.rope_dim), dim=-1)
    short, key = project("latents", x).split((latent.rank, latent.rope_dim), dim=-1)
    turned, key = (rotate(_apart(t) if latent.interleaved else t) for t in (turned, key[:, None]))
    short = project("norm", short)[:, None]
    short = short if latent.latent_scale == 1.0 else short * latent.latent_scale
    return torch.cat((plain, turned), dim=-1), short, key


def _apart(x: Tensor) -> Tensor:
    """The first of each pair, then the second: after this the pairs are halves, as the cache keeps them."""
    apart: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return apart


def expanded(short: Tensor, key: Tensor, up: Tensor, latent: Latent) -> tuple[Tensor, Tensor]:
    """Keys `(B, H, L, D)` and values `(B, H, L, V)` of all heads.

    Args:
        short: `(B, 1, L, R)`.
        key: `(B, 1, L, rope_dim)`.
        up: `(H * (plain_dim + value_dim), R)`.
        latent: The widths.
    """
    both = (short[:, 0] @ up.mT).unflatten(-1, (-1, latent.plain_dim + latent.value_dim)).transpose(1, 2)
    plain, values = both.split((latent.plain_dim, latent.value_dim), dim=-1)
    return torch.cat((plain, key.expand(-1, plain.shape[1], -1, -1)), dim=-1), values


def absorbed(
    q: Tensor, short: Tensor, key: Tensor, up: Tensor, *, latent: Latent, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of one token per sequence, without making any head's keys and values.

    A score is `q . (up_k c)`, which is `(up_k^T q) . c`: the projection moves to the query, of which there is
    one, from the keys, of which there are L; the values' projection moves behind the sum alike.

    Args:
        q: `(B, H, 1, D)`.
        short: `(B, 1, L, R)`.
        key: `(B, 1, L, rope_dim)`.
        up: `(H * (plain_dim + value_dim), R)`.
        latent: The widths.
        mask: As `attention` takes it.
        scale: Multiplies the scores.

    Returns:
        `(B, 1, H, V)`.
    """
    by_head = up.unflatten(0, (-1, latent.plain_dim + latent.value_dim))
    up_keys, up_values = by_head.split((latent.plain_dim, latent.value_dim), dim=1)
    plain, turned = q.split((latent.plain_dim, latent.rope_dim), dim=-1)
    asked = torch.cat((plain @ up_keys, turned), dim=-1)
    kept = torch.cat((short, key), dim=-1)
    out = attention(asked, kept, short, mask=mask, causal=False, scale=scale)
    values: Tensor = out.transpose(1, 2) @ up_values.mT
    return values.transpose(1, 2)
