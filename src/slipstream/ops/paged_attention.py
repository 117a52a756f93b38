"""Attention of a packed batch over a paged KV cache: prefill, chunked prefill and decode in one signature.

Shapes: T packed tokens, N sequences, H heads, K kv heads, D head dim, P blocks (pages), Z tokens per block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.ops.attention import attention, scores_to_output
from slipstream.ops.bind import Case, Op
from slipstream.ops.step import AttentionMask, Step

__all__ = ["OP", "paged_attention", "write_cache"]


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write new keys and values into their slots, in place.

    Args:
        k: `(T, K, D)`.
        v: `(T, K, D)`.
        k_cache: `(P, Z, K, D)`, contiguous; updated.
        v_cache: `(P, Z, K, D)`, contiguous; updated.
        slots: `(T,)` int64, each one distinct.
    """
    k_cache.flatten(0, 1).index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slots, v.to(v_cache.dtype))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step, *, mask: AttentionMask
) -> Tensor:
    """Return causal attention of every packed query over its own sequence's cache.

    Source: Kwon et al. 2023 (arXiv 2309.06180) for the paged layout; `attention` for the formula.

    Args:
        q: `(T, H, D)`.
        k_cache: `(P, Z, K, D)`, with this step's keys already written.
        v_cache: `(P, Z, K, D)`; slots that no step has written may hold anything, NaN among it.
        step: Lengths and block table.
        mask: Window, soft cap, slopes, sinks.

    Returns:
        `(T, H, D)` in the dtype of `q`.
    """
    if step.max_query_len == 1:
        return _decode(q, k_cache, v_cache, step, mask)
    starts, lens = step.query_starts.tolist(), step.kv_lens.tolist()
    size = k_cache.shape[1]
    out = torch.empty_like(q)
    for i, length in enumerate(lens):
        tokens = slice(starts[i], starts[i + 1])
        blocks = step.block_table[i, : -(-length // size)].long()
        k, v = (
            c[blocks].flatten(0, 1)[:length].transpose(0, 1)[None].to(q.dtype) for c in (k_cache, v_cache)
        )
        positions = torch.arange(length - (starts[i + 1] - starts[i]), length, device=q.device)
        visible, bias = _visibility(positions[:, None], torch.arange(length, device=q.device)[None], mask)
        queries = q[tokens].transpose(0, 1)[None]
        out[tokens] = _attend(queries, k, v, visible[None, None], bias, mask)[0]
    return out


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step, mask: AttentionMask) -> Tensor:
    """One query per sequence: the caches are gathered side by side and masked to their lengths."""
    size = k_cache.shape[1]
    blocks = step.block_table[:, : -(-step.max_kv_len // size)].long()
    k, v = (
        c[blocks].flatten(1, 2)[:, : step.max_kv_len].transpose(1, 2).to(q.dtype) for c in (k_cache, v_cache)
    )
    keys = torch.arange(step.max_kv_len, device=q.device)[None, None]
    if len(blocks) > 1 or step.max_kv_len == step.block_table.shape[1] * size:
        # What lies beyond a sequence's end belongs to others, or to nobody; a NaN there survives a weight of
        # zero.
        beyond = (keys >= step.kv_lens[:, None, None]).unsqueeze(-1)
        k, v = k.masked_fill(beyond, 0), v.masked_fill(beyond, 0)
    visible, bias = _visibility((step.kv_lens.long() - 1)[:, None, None], keys, mask)
    bias = None if bias is None else bias.transpose(0, 1)
    return _attend(q[:, :, None], k, v, visible[:, None], bias, mask)[:, 0]


def _visibility(queries: Tensor, keys: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor | None]:
    """Which keys each query sees, `(..., S, L)`, and the slopes' bias, `(H, ..., S, L)`."""
    visible = keys <= queries
    if mask.window is not None:
        visible = visible & (keys > queries - mask.window)
    if mask.alibi is None:
        return visible, None
    slopes = mask.alibi.view(-1, *(1 for _ in range(visible.dim())))
    return visible, slopes * (keys - queries).float()[None]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None, mask: AttentionMask
) -> Tensor:
    """`(B, S, H, D)` of queries `(B, H, S, D)`, visibility `(B, 1, S, L)` and a bias upon the scores."""
    if bias is not None:
        bias = bias[None] if bias.dim() == 3 else bias.reshape(visible.shape[0], -1, *visible.shape[2:])
        blocked = torch.zeros_like(bias).masked_fill(~visible, torch.finfo(torch.float32).min)
        return scores_to_output(
            q, k, v, mask=bias + blocked, scale=mask.scale, softcap=mask.softcap, sinks=mask.sinks
        )
    return attention(
        q, k, v, mask=visible, causal=False, scale=mask.scale, softcap=mask.softcap, sinks=mask.sinks
    )


def _case(name: str, queries: tuple[int, ...], lens: tuple[int, ...], **options: Any) -> Case:
    heads, kv_heads, dim, size = options.get("heads", (4, 2, 16, 8))

    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        per_row = [-(-length // size) for length in lens]
        order = torch.randperm(sum(per_row) + 1, generator=generator).tolist()
        table = torch.zeros(len(lens), max(per_row), dtype=torch.int32)
        for i, count in enumerate(per_row):
            table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
        k_cache, v_cache = (
            torch.randn(sum(per_row) + 1, size, kv_heads, dim, generator=generator).to(dtype)
            for _ in range(2)
        )
        for cache in (k_cache, v_cache):
            for i, length in enumerate(lens):
                if length % size:
                    cache[table[i, length // size], length % size :] = torch.nan
        positions = [p for n, length in zip(queries, lens, strict=True) for p in range(length - n, length)]
        rows = [i for i, n in enumerate(queries) for _ in range(n)]
        slots = [int(table[r, p // size]) * size + p % size for r, p in zip(rows, positions, strict=True)]
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        step = Step(
            token_ids=torch.zeros(len(rows), dtype=torch.int64),
            positions=torch.tensor(positions),
            query_starts=starts,
            kv_lens=torch.tensor(lens, dtype=torch.int32),
            block_table=table,
            slots=torch.tensor(slots),
            logit_rows=starts[1:].long() - 1,
            max_query_len=max(queries),
            max_kv_len=table.shape[1] * size if options.get("bound") else max(lens),
        )
        mask = AttentionMask(
            dim**-0.5,
            options.get("window"),
            options.get("softcap"),
            2.0 ** -torch.arange(1.0, heads + 1) if options.get("alibi") else None,
            torch.randn(heads, generator=generator) if options.get("sinks") else None,
        )
        q = torch.randn(len(rows), heads, dim, generator=generator).to(dtype)
        return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "step": step, "mask": mask}

    return Case(name, make)


OP = Op(
    "paged_attention",
    paged_attention,
    (
        _case("decode, one sequence", (1,), (1,)),
        _case("decode, a length below its bound", (1,), (11,), bound=True),
        _case("decode, ragged", (1, 1, 1), (9, 1, 16)),
        _case("decode, grouped six to one", (1, 1), (7, 33), heads=(6, 1, 24, 8)),
        _case("decode, window", (1, 1), (30, 5), window=8),
        _case("decode, soft cap", (1, 1), (12, 3), softcap=4.0),
        _case("decode, slopes", (1, 1, 1), (12, 3, 8), alibi=True),
        _case("decode, sinks", (1, 1), (10, 17), sinks=True),
        _case("prefill, ragged", (7, 1, 13), (7, 1, 13)),
        _case("prefill, slopes", (5, 9), (5, 9), alibi=True),
        _case("prefill, window and soft cap", (20, 3), (20, 3), window=4, softcap=3.0),
        _case("prefill, sinks", (6, 8), (6, 8), sinks=True),
        _case("chunk upon a cache", (4, 1, 6), (20, 9, 6), window=7),
    ),
)
