"""Attention of a packed batch over a paged KV cache: prefill, chunked prefill and decode in one signature.

Shapes: T packed tokens, N sequences, H heads, K kv heads, D head dim, P blocks (pages), Z tokens per block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.ops.attention import attention, scores_to_output
from slipstream.ops.bind import Case, Op
from slipstream.ops.kv_cache import CachePart, Int8Cache, read_cache, write_cache
from slipstream.ops.step import AttentionMask, Step

__all__ = ["OP", "paged_attention"]


def paged_attention(
    q: Tensor, k_cache: CachePart, v_cache: CachePart, step: Step, *, mask: AttentionMask
) -> Tensor:
    """Return causal attention of every packed query over its own sequence's cache.

    Source: Kwon et al. 2023 (arXiv 2309.06180) for the paged layout; `attention` for the formula.

    Args:
        q: `(T, H, D)`.
        k_cache: `(P, Z, K, D)`, dense or int8, with this step's keys already written.
        v_cache: `(P, Z, K, D)`, likewise; slots that no step has written may hold anything, including NaN.
        step: Lengths and block table.
        mask: Window, soft cap, slopes, sinks.

    Returns:
        `(T, H, D)` in the dtype of `q`.
    """
    if step.max_query_len == 1:
        return _decode(q, k_cache, v_cache, step, mask)
    if step.static:
        return _static(q, k_cache, v_cache, step, mask)
    starts, lens = step.query_starts.tolist(), step.kv_lens.tolist()
    size = k_cache.shape[1]
    out = torch.empty_like(q)
    for i, length in enumerate(lens):
        tokens = slice(starts[i], starts[i + 1])
        blocks = step.block_table[i, : -(-length // size)].long()
        k, v = (
            read_cache(c, blocks, q.dtype).flatten(0, 1)[:length].transpose(0, 1)[None]
            for c in (k_cache, v_cache)
        )
        positions = torch.arange(length - (starts[i + 1] - starts[i]), length, device=q.device)
        visible, bias = _visibility(positions[:, None], torch.arange(length, device=q.device)[None], mask)
        queries = q[tokens].transpose(0, 1)[None]
        out[tokens] = _attend(queries, k, v, visible[None, None], bias, mask)[0]
    return out


def _decode(q: Tensor, k_cache: CachePart, v_cache: CachePart, step: Step, mask: AttentionMask) -> Tensor:
    """Attend with one query per sequence: gather the caches into a batch and mask them to their lengths."""
    size = k_cache.shape[1]
    blocks = step.block_table[:, : -(-step.max_kv_len // size)].long()
    k, v = (
        read_cache(c, blocks, q.dtype).flatten(1, 2)[:, : step.max_kv_len].transpose(1, 2)
        for c in (k_cache, v_cache)
    )
    keys = torch.arange(step.max_kv_len, device=q.device)[None, None]
    if len(blocks) > 1 or step.max_kv_len == step.block_table.shape[1] * size:
        # Keys beyond a sequence's end belong to other sequences or are unused; NaN there would survive a
        # weight of zero.
        beyond = (keys >= step.kv_lens[:, None, None]).unsqueeze(-1)
        k, v = k.masked_fill(beyond, 0), v.masked_fill(beyond, 0)
    visible, bias = _visibility((step.kv_lens.long() - 1)[:, None, None], keys, mask)
    bias = None if bias is None else bias.transpose(0, 1)
    return _attend(q[:, :, None], k, v, visible[:, None], bias, mask)[:, 0]


def _static(q: Tensor, k_cache: CachePart, v_cache: CachePart, step: Step, mask: AttentionMask) -> Tensor:
    """Attend without reading lengths back: each query attends to every sequence; its own's result is kept."""
    size, out = k_cache.shape[1], torch.zeros_like(q)
    rows = torch.arange(q.shape[0], device=q.device, dtype=step.query_starts.dtype)
    owner = torch.searchsorted(step.query_starts[1:].contiguous(), rows, right=True)
    keys = torch.arange(step.max_kv_len, device=q.device)
    for i in range(step.kv_lens.shape[0]):
        blocks = step.block_table[i, : -(-step.max_kv_len // size)].long()
        beyond = (keys >= step.kv_lens[i])[:, None, None]
        k, v = (
            read_cache(c, blocks, q.dtype).flatten(0, 1)[: step.max_kv_len].masked_fill(beyond, 0)
            for c in (k_cache, v_cache)
        )
        positions = rows.long() + (step.kv_lens[i] - step.query_starts[i + 1])
        visible, bias = _visibility(positions[:, None], keys[None], mask)
        queries, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        result = _attend(queries, k, v, visible[None, None], bias, mask)[0]
        out = torch.where((owner == i)[:, None, None], result, out)
    return out


def _visibility(queries: Tensor, keys: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor | None]:
    """Return which keys each query sees, `(..., S, L)`, and the ALiBi bias, `(H, ..., S, L)`."""
    visible = keys <= queries
    if mask.window is not None:
        visible = visible & (keys > queries - mask.window)
    if mask.chunk is not None:
        visible = visible & (keys >= queries - queries % mask.chunk)
    if mask.alibi is None:
        return visible, None
    slopes = mask.alibi.view(-1, *(1 for _ in range(visible.dim())))
    return visible, slopes * (keys - queries).float()[None]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None, mask: AttentionMask
) -> Tensor:
    """Return `(B, S, H, D)` for queries `(B, H, S, D)`, visibility `(B, 1, S, L)` and a bias for scores."""
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
        sinks = torch.randn(heads, generator=generator) if options.get("sinks") else None
        if sinks is not None and options.get("lowest"):
            sinks[:2] = torch.tensor([torch.finfo(torch.float32).min, -1e38])
        mask = AttentionMask(
            dim**-0.5,
            options.get("window"),
            options.get("chunk"),
            options.get("softcap"),
            2.0 ** -torch.arange(1.0, heads + 1) if options.get("alibi") else None,
            sinks,
        )
        q = torch.randn(len(rows), heads, dim, generator=generator).to(dtype)
        if not options.get("int8"):
            return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "step": step, "mask": mask}
        return {"q": q, "k_cache": _int8(k_cache), "v_cache": _int8(v_cache), "step": step, "mask": mask}

    return Case(name, make)


def _int8(cache: Tensor) -> Int8Cache:
    """Return a cache in int8, with NaN where the given one has it."""
    part = Int8Cache(torch.zeros(cache.shape, dtype=torch.int8), torch.zeros(cache.shape[:3]))
    slots = torch.arange(cache.shape[0] * cache.shape[1])
    rows = cache.flatten(0, 1)
    write_cache(rows.nan_to_num(), rows.nan_to_num(), part, part, slots)
    part.scales.masked_fill_(cache.isnan().any(-1), torch.nan)
    return part


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
        _case("prefill, sinks that weigh nothing", (64, 3), (80, 3), sinks=True, lowest=True),
        _case("prefill, a window beyond 32 bits", (20, 3), (20, 3), window=2**32 + 4),
        _case("chunk upon a cache", (4, 1, 6), (20, 9, 6), window=7),
        *(
            _case(f"width {dim}", (2, 1, 5), (33, 257, 5), heads=(4, 2, dim, 32))
            for dim in (33, 80, 96, 128, 256)
        ),
        *(_case(f"{n} tokens", (n,), (n,), heads=(6, 2, 32, 32)) for n in (1, 31, 32, 33, 64, 65, 257)),
        _case("chunks", (1, 1, 20), (30, 8, 20), chunk=8),
        _case("chunks upon a cache", (4, 1, 6), (20, 9, 6), chunk=7, softcap=3.0),
        _case("a chunk that ends with a tile", (130, 1), (130, 200), chunk=64, heads=(3, 1, 16, 32)),
        _case("chunks of one wider than a tile", (130, 1), (130, 200), chunk=65, heads=(3, 1, 16, 32)),
        _case("window that ends with a tile", (130, 1), (130, 200), window=64, heads=(3, 1, 16, 32)),
        _case("window one wider than a tile", (130, 1), (130, 200), window=65, heads=(3, 1, 16, 32)),
        _case("pages of a prime size", (40, 3), (90, 70), heads=(4, 4, 16, 7)),
        _case("a long cache of one sequence", (1,), (1500,), heads=(8, 2, 64, 32), sinks=True),
        _case("a long cache, slopes and window", (3, 1), (1300, 40), window=700, alibi=True),
        _case("many heads share one", (2, 1), (70, 5), heads=(140, 1, 8, 32)),
        _case("int8, decode", (1, 1, 1), (9, 1, 300), int8=True, heads=(6, 2, 40, 32)),
        _case("int8, chunks", (70, 4, 1), (70, 90, 33), int8=True, softcap=4.0, heads=(4, 1, 64, 32)),
    ),
)
