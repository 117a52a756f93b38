"""`rope_cache` on the GPU: one launch rotates and caches a token's heads, where torch would need five.

A program takes some heads of one token: queries, which it rotates, or keys and values. Of these it rotates
the keys, rounds both as the cache stores them, and writes them to their slot.

Shapes: T packed tokens, H heads, K kv heads, D head dim, R rotated dims, P blocks (pages), Z tokens per
    block.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.attention_tile import parts_of
from slipstream.kernels.triton.heads import head_rows, kept
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.tables import launched
from slipstream.kernels.triton.target import Bucket, Build, Launch, generation, refuse
from slipstream.ops.bind import Kernel
from slipstream.ops.kv_cache import CachePart

__all__ = ["BUILDS", "KERNELS", "build_of"]


# A launch passes pointers and numbers one by one, so the arguments cannot be grouped into objects.
@triton.jit
def _rotate_and_keep(
    q, k, v, cos, sin, out, k_cache, v_cache, k_scales, v_scales, slots,
    heads, kv_heads, q_row, k_row, v_row, angle_row, angle_step, query_blocks,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, INT8: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    like = k.dtype.element_ty
    cos += token * angle_row
    sin += token * angle_row
    if block < query_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        is_query = head < heads
        rows = head_rows(
            q + token * q_row, head, is_query, head, q, cos, sin, angle_step, 0.0, 0.0, 0.0,
            DIM, HALF, INTERLEAVED, 0, False, DIMS,
        )  # fmt: skip
        dim = tl.arange(0, DIMS)[None, :]
        own = (token * heads + head)[:, None] * DIM + dim
        tl.store(out + own, rows.to(out.dtype.element_ty), mask=is_query[:, None] & (dim < DIM))
    else:
        head = (block - query_blocks) * HEADS + tl.arange(0, HEADS)
        inside = head < kv_heads
        keys = head_rows(
            k + token * k_row, head, inside, head, k, cos, sin, angle_step, 0.0, 0.0, 0.0,
            DIM, HALF, INTERLEAVED, 0, False, DIMS,
        )  # fmt: skip
        values = head_rows(
            v + token * v_row, head, inside, head, v, cos, sin, angle_step, 0.0, 0.0, 0.0,
            DIM, 0, False, 0, False, DIMS,
        )  # fmt: skip
        place = tl.load(slots + token) * kv_heads + head
        kept(keys, k_cache, k_scales, place, inside, like, DIM, INT8)
        kept(values, v_cache, v_scales, place, inside, like, DIM, INT8)


def _form(heads: int, dim: int, int8: bool) -> tuple[Bucket, Launch]:
    dims, padded = triton.next_power_of_2(dim), triton.next_power_of_2(heads)
    launch = Launch({"HEADS": min(padded, max(1024 // dims, 1)), "DIMS": dims}, warps=4)
    shape = f"{padded} x {dims}{', int8' if int8 else ''}"
    return Bucket("rope and cache", shape, {"HEADS": (1, 2, 4, 8, 16)}), launch


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    caches: list[Tensor],
    slots: Tensor,
    interleaved: bool,
) -> Tensor:
    tokens, heads, dim = q.shape
    kv_heads, int8 = k.shape[1], caches[0].dtype == torch.int8
    # q, k and v may be parts of one tensor: the heads of a token are contiguous, tokens are not.
    q, k, v = (t if t.stride()[1:] == (dim, 1) else t.contiguous() for t in (q, k, v))
    cos, sin = tables or (q, q)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    out = q.new_empty(tokens, heads, dim) if tables else q.new_empty(0)
    if tokens:
        launch = launched(*_form(heads, dim, int8), generation(q.device))
        each = launch.sizes["HEADS"]
        # Where nothing is rotated, queries are returned as they are, and need no programs.
        queries = triton.cdiv(heads, each) if tables else 0
        _rotate_and_keep[(tokens, queries + triton.cdiv(kv_heads, each))](
            *(q, k, v, cos, sin, out, *caches, slots),
            *(heads, kv_heads, q.stride(0), k.stride(0), v.stride(0)),
            *(cos.stride() if tables else (0, 0)),
            queries,
            DIM=dim,
            HALF=cos.shape[-1] if tables else 0,
            INTERLEAVED=interleaved,
            INT8=int8,
            **launch.options(),
        )
    return out


_rope_cache = operator(
    "rope_cache(Tensor q, Tensor k, Tensor v, Tensor[] tables, Tensor(a!)[] caches, Tensor slots, "
    "bool interleaved) -> Tensor",
    _launch,
    lambda q, k, v, tables, caches, slots, interleaved: q.new_empty(q.shape if tables else 0),
)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: CachePart,
    v_cache: CachePart,
    slots: Tensor,
    *,
    tables: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> Tensor:
    (keys, k_scales), (values, v_scales) = parts_of(k_cache), parts_of(v_cache)
    caches = [keys, values, k_scales, v_scales]
    rotated: Tensor = _rope_cache(q, k, v, list(tables or ()), caches, slots, interleaved)
    return q if tables is None else rotated


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

KERNELS = (Kernel("rope_cache", "triton", "cuda", functools.partial(refuse, dtypes=_DTYPES), _run),)


def build_of(heads: int, dim: int, *, interleaved: bool = False, int8: bool = False) -> Build:
    """Return the build for some heads of which all dims are rotated."""
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"slots": "*i64"}
    types |= dict.fromkeys(("k_cache", "v_cache"), "*i8" if int8 else "*bf16")
    types |= dict.fromkeys(("cos", "sin", "k_scales", "v_scales"), "*fp32")
    numbers = ("heads", "kv_heads", "q_row", "k_row", "v_row", "angle_row", "angle_step", "query_blocks")
    constants = {"DIM": dim, "HALF": dim // 2, "INTERLEAVED": interleaved, "INT8": int8}
    bucket, launch = _form(heads, dim, int8)
    return Build(
        f"rope and cache, {heads} heads of {dim}, {'pairs' if interleaved else 'halves'}{', int8' * int8}",
        _rotate_and_keep,
        types | dict.fromkeys(numbers, "i32") | constants,
        launch,
        frozenset({"q_row", "k_row", "v_row"}),
        registers=128,
        wide_loads=0,
        bucket=bucket,
    )


BUILDS = (build_of(32, 128), build_of(32, 128, int8=True), build_of(12, 64, interleaved=True))
