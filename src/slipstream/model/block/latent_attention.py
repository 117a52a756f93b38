"""Multi-head latent attention: keys and values of all heads are projections of one short vector per token.

A cache keeps only that vector (after its norm) and one rotated key, which all heads share:
`rank + rope_dim` numbers per token and layer. Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.

Shapes: B batch, T packed tokens, L keys, H heads, D head dim (unrotated, then rotated), R latent width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.ops.attention import attention
from slipstream.ops.kv_cache import CachePart, read_cache
from slipstream.ops.step import Step
from slipstream.spec import Latent

__all__ = ["absorbed", "attend_paged", "expanded", "queries_and_latents"]

Project = Callable[[str, Tensor], Tensor]
"""Applies the linear or norm of the block that `queries_and_latents` names."""


def queries_and_latents(
    x: Tensor, latent: Latent, project: Project, rotate: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, latents and shared keys.

    Args:
        x: `(T, C)`.
        latent: The widths.
        project: Applies "queries", "latents" or "norm".
        rotate: Applies the rotary embedding to `(T, heads, rope_dim)`.

    Returns:
        Queries `(T, H, D)`, latents `(T, 1, R)` and the shared rotated keys `(T, 1, rope_dim)`.
    """
    q = project("queries", x).unflatten(-1, (-1, latent.plain_dim + latent.rope_dim))
    q = q if latent.query_scale == 1.0 else q * latent.query_scale
    plain, rotated = q.split((latent.plain_dim, latent.rope_dim), dim=-1)
    short, key = project("latents", x).split((latent.rank, latent.rope_dim), dim=-1)
    rotated, key = (rotate(_apart(t) if latent.interleaved else t) for t in (rotated, key[:, None]))
    short = project("norm", short)[:, None]
    short = short if latent.latent_scale == 1.0 else short * latent.latent_scale
    return torch.cat((plain, rotated), dim=-1), short, key


def _apart(x: Tensor) -> Tensor:
    """Reorder adjacent pairs into halves, as the cache keeps them: even elements first, then odd ones."""
    halves: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves


def expanded(short: Tensor, key: Tensor, up: Tensor, latent: Latent) -> tuple[Tensor, Tensor]:
    """Compute keys `(B, H, L, D)` and values `(B, H, L, V)` of all heads from latents.

    Args:
        short: The latents, `(B, 1, L, R)`.
        key: The shared rotated keys, `(B, 1, L, rope_dim)`.
        up: `(H * (plain_dim + value_dim), R)`.
        latent: The widths.
    """
    both = (short[:, 0] @ up.mT).unflatten(-1, (-1, latent.plain_dim + latent.value_dim)).transpose(1, 2)
    plain, values = both.split((latent.plain_dim, latent.value_dim), dim=-1)
    return torch.cat((plain, key.expand(-1, plain.shape[1], -1, -1)), dim=-1), values


def absorbed(
    q: Tensor, short: Tensor, key: Tensor, up: Tensor, *, latent: Latent, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend with one query per sequence, without expanding keys and values per head.

    A score is `q . (up_k c)`, which equals `(up_k^T q) . c`, so the projection is applied to the one query
    instead of the L keys; likewise the projection of the values is applied after the weighted sum.

    Args:
        q: `(B, H, 1, D)`.
        short: The latents, `(B, 1, L, R)`.
        key: The shared rotated keys, `(B, 1, L, rope_dim)`.
        up: `(H * (plain_dim + value_dim), R)`.
        latent: The widths.
        mask: As `attention` takes it.
        scale: Multiplies the scores.

    Returns:
        `(B, 1, H, V)`.
    """
    by_head = up.unflatten(0, (-1, latent.plain_dim + latent.value_dim))
    up_keys, up_values = by_head.split((latent.plain_dim, latent.value_dim), dim=1)
    plain, rotated = q[:, :, 0].split((latent.plain_dim, latent.rope_dim), dim=-1)
    # Batched over heads, not sequences: each head's matrix is read once, whatever the batch size.
    queries = torch.cat(((plain.transpose(0, 1) @ up_keys).transpose(0, 1), rotated), dim=-1)
    cached = torch.cat((short[:, 0], key[:, 0]), dim=-1)
    scores = (queries @ cached.mT).float() * scale
    if mask is not None:
        visible = mask[:, 0] if mask.shape[1] == 1 else mask[:, :, 0]
        lowest = torch.finfo(torch.float32).min
        scores = scores.masked_fill(~visible, lowest) if visible.dtype == torch.bool else scores + visible
    out = scores.softmax(-1).to(q.dtype) @ short[:, 0]
    if out.dtype == torch.float32:
        return (out.transpose(0, 1) @ up_values.mT).transpose(0, 1)[:, None]  # type: ignore[no-any-return]
    # Transposed in bfloat16, torch takes 2.4 to 4 times as long; in float32 up to half as long.
    return (up_values @ out.permute(1, 2, 0)).permute(2, 0, 1)[:, None]  # type: ignore[no-any-return]


def attend_paged(
    q: Tensor,
    caches: tuple[CachePart, CachePart],
    step: Step,
    up: Tensor,
    *,
    latent: Latent,
    scale: float,
) -> Tensor:
    """Attend causally with packed queries to pages of latents, the counterpart of `paged_attention`.

    Sequences with one query absorb the projections; the others expand their latents for this call.

    Args:
        q: `(T, H, D)`.
        caches: Latents `(P, Z, 1, R)` and shared keys `(P, Z, 1, rope_dim)`, including those of this step;
            slots that no step has written may hold anything, even NaN.
        step: Lengths and block table.
        up: `(H * (plain_dim + value_dim), R)`.
        latent: The widths.
        scale: Multiplies the scores.

    Returns:
        `(T, H, V)` in the dtype of `q`.
    """
    size = caches[0].shape[1]
    if step.max_query_len == 1:
        pages = step.block_table[:, : -(-step.max_kv_len // size)].long()
        keys = torch.arange(step.max_kv_len, device=q.device)
        visible = keys < step.kv_lens[:, None]
        # A NaN beyond a sequence's end would survive multiplication by a weight of zero.
        short, key = (
            read_cache(part, pages, q.dtype)
            .flatten(1, 2)[:, : step.max_kv_len, 0]
            .masked_fill(~visible[..., None], 0)[:, None]
            for part in caches
        )
        mask = visible[:, None, None]
        return absorbed(q[:, :, None], short, key, up, latent=latent, mask=mask, scale=scale)[:, 0]
    starts, lens = step.query_starts.tolist(), step.kv_lens.tolist()
    out = q.new_empty(*q.shape[:2], latent.value_dim)
    for row, length in enumerate(lens):
        tokens = slice(starts[row], starts[row + 1])
        pages = step.block_table[row, : -(-length // size)].long()
        short, key = (
            read_cache(part, pages, q.dtype).flatten(0, 1)[:length].transpose(0, 1)[None] for part in caches
        )
        queries = q[tokens].transpose(0, 1)[None]
        if queries.shape[2] == 1:
            out[tokens] = absorbed(queries, short, key, up, latent=latent, mask=None, scale=scale)[0]
        else:
            keys_values = expanded(short, key, up, latent)
            out[tokens] = attention(queries, *keys_values, mask=None, causal=True, scale=scale)[0]
    return out
