"""`paged_attention` on the CPU: each cache block is read once for all heads that share it, and never copied.

Shapes: T packed tokens, N sequences, H heads, K kv heads, D head dim, P blocks (pages), Z tokens per block.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, INT8_CODES, PagedAttentionCall, address
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.kv_cache import CachePart, Int8Cache
from slipstream.ops.paged_attention import paged_attention
from slipstream.ops.step import AttentionMask, Step

__all__ = [
    "KERNELS",
    "cache_dtype",
    "cache_of",
    "mask_of",
    "native_paged_attention",
    "readable",
    "serves",
    "serves_pair",
    "step_of",
]

_WIDEST = 2**31 - 1
"""Largest window that the library's 32 bits hold; no sequence is longer."""


def mask_of(mask: AttentionMask) -> abi.Mask:
    """Describe a mask to the library; its tensors must be kept alive."""
    return abi.Mask(
        alibi=address(mask.alibi),
        sinks=address(mask.sinks),
        scale=mask.scale,
        softcap=mask.softcap or 0.0,
        window=min(mask.window or 0, _WIDEST),
        chunk=min(mask.chunk or 0, _WIDEST),
        sinks_dtype=0 if mask.sinks is None else DTYPES[mask.sinks.dtype],
    )


def step_of(step: Step, shape: torch.Size) -> abi.Step:
    """Describe a step over a cache of shape `(P, Z, K, D)` to the library; its tensors must be kept alive."""
    return abi.Step(
        tokens=step.slots.shape[0],
        sequences=step.kv_lens.shape[0],
        table_width=step.block_table.shape[1],
        cache_blocks=shape[0],
        block_size=shape[1],
        query_starts=address(step.query_starts),
        kv_lens=address(step.kv_lens),
        block_table=address(step.block_table),
        slots=address(step.slots),
    )


def serves(step: Step) -> bool:
    """Whether a step's tensors have the dtypes and the layout that the library reads."""
    ints = (step.query_starts, step.kv_lens, step.block_table)
    return (
        all(t.dtype == torch.int32 and t.is_contiguous() for t in ints)
        and step.slots.dtype == torch.int64
        and step.slots.is_contiguous()
        and (step.states is None or (step.states.dtype == torch.int32 and step.states.is_contiguous()))
    )


def readable(cache: CachePart) -> bool:
    """Whether the library can read a cache."""
    if isinstance(cache, Int8Cache):
        return all(t.device.type == "cpu" and t.is_contiguous() for t in (cache.codes, cache.scales))
    return cache.dtype in DTYPES and cache.device.type == "cpu" and cache.is_contiguous()


def serves_pair(k: CachePart, v: CachePart, *, adjacent: bool) -> bool:
    """Whether the library can read a layer's cache.

    Args:
        k: `(P, Z, K, D)`, or latents `(P, Z, 1, R)`.
        v: Like `k`, or rotated keys `(P, Z, 1, r)`.
        adjacent: Both are latent attention's, which must lie side by side in rows `(P, Z, R + r)`.
    """
    if not adjacent:
        return readable(k) and readable(v)
    if isinstance(k, Int8Cache) or isinstance(v, Int8Cache):
        return False
    width = k.shape[3] + v.shape[3]
    return (
        k.dtype in DTYPES
        and k.device.type == "cpu"
        and k.stride()[:2] == v.stride()[:2] == (k.shape[1] * width, width)
        and k.stride(3) == v.stride(3) == 1
        and v.data_ptr() == k.data_ptr() + k.shape[3] * k.itemsize
    )


def cache_dtype(cache: CachePart) -> int:
    """Return the library's number of a readable cache's dtype."""
    return INT8_CODES if isinstance(cache, Int8Cache) else DTYPES[cache.dtype]


def cache_of(k: CachePart, v: CachePart) -> abi.Cache:
    """Describe the cache of one layer to the library; its tensors must be kept alive.

    Latents and rotated keys side by side are one cache, whose start the library is given twice.
    """
    if not isinstance(k, Int8Cache) and not k.is_contiguous():
        return abi.Cache(address(k), address(k))
    (keys, k_scales), (values, v_scales) = (
        (c.codes, c.scales) if isinstance(c, Int8Cache) else (c, None) for c in (k, v)
    )
    return abi.Cache(address(keys), address(values), address(k_scales), address(v_scales))


def native_paged_attention(
    q: Tensor, k_cache: CachePart, v_cache: CachePart, step: Step, *, mask: AttentionMask, library: Library
) -> Tensor:
    """Compute `ops.paged_attention`, always with the library.

    Raises:
        ValueError: The library cannot read one of the tensors.
    """
    if q.dtype not in DTYPES or not readable(k_cache) or not readable(v_cache):
        raise ValueError(f"q in {q.dtype} with caches in {k_cache.dtype} and {v_cache.dtype} is unsupported")
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype or not serves(step):
        raise ValueError("the caches differ, or the step's tensors do not have the dtypes in its docstring")
    if q.shape[0] != step.slots.shape[0] or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"q of shape {tuple(q.shape)} does not fit the step or {tuple(k_cache.shape)}")
    q = q.contiguous()
    out = torch.empty_like(q)
    call = PagedAttentionCall(
        q=address(q),
        out=address(out),
        cache=cache_of(k_cache, v_cache),
        heads=q.shape[1],
        kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        dtype=DTYPES[q.dtype],
        cache_dtype=cache_dtype(k_cache),
        mask=mask_of(mask),
        step=step_of(step, k_cache.shape),
    )
    library.run("paged_attention", call)
    return out


def _refuse(facts: Facts, *, isa: str) -> str | None:
    if facts.dtype not in DTYPES:
        return f"computes in float32, bfloat16 and float16, not {facts.dtype}"
    return refuse(isa)


def _run(
    q: Tensor, k_cache: CachePart, v_cache: CachePart, step: Step, *, mask: AttentionMask, isa: str
) -> Tensor:
    library = load(isa)
    # A model may be cast after it was bound.
    if library is None or q.dtype not in DTYPES or not readable(k_cache) or not readable(v_cache):
        return paged_attention(q, k_cache, v_cache, step, mask=mask)
    return native_paged_attention(q, k_cache, v_cache, step, mask=mask, library=library)


def _kernel(isa: str) -> Kernel:
    decide = functools.partial(_refuse, isa=isa)
    return Kernel("paged_attention", f"cpu-{isa}", "cpu", decide, functools.partial(_run, isa=isa))


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)
