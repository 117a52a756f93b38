"""The subjects of `scripts/tune_kernels`: buckets of shapes of common models, each with a form and a call.

Shapes are those of Llama 3 (1B, 8B), Qwen 2.5 and Gemma 2. Calls run on the current GPU, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.tuning import Subject
from slipstream.formats import FORMATS as PACKED
from slipstream.kernels.triton import (
    activation,
    argmax,
    attention,
    decode_attention,
    draw,
    fp8_rows,
    linear,
    matmul,
    moe,
    norm,
    one_row,
    rope,
    rope_cache,
    unpack,
)
from slipstream.kernels.triton.decode import FORMATS
from slipstream.kernels.triton.operands import Around, Matrix
from slipstream.kernels.triton.target import Bucket
from slipstream.ops.activation import KINDS
from slipstream.ops.draw import Warp
from slipstream.ops.kv_cache import CachePart, Int8Cache
from slipstream.ops.linear import Rounding, Weight
from slipstream.ops.step import AttentionMask, Step
from slipstream.spec import Norm

__all__ = ["subjects"]

Call = Callable[[], Any]
NAMES = ("plain", "int8", "fp8", "int4", "fp6")
HEADS = ((32, 8, 128), (32, 8, 64), (28, 4, 128), (14, 2, 64), (8, 4, 256), (32, 32, 128), (12, 12, 64))
_LENGTH, _PAGE = 1024, 32

DEVICE = "cuda"
"""The device on which calls run; tests change it."""


def subjects(generation: int) -> Iterator[Subject]:
    """Yield every bucket once, with the form that a generation compiles and the call of its first shape.

    Args:
        generation: 80 or 90.
    """
    seen: set[Bucket] = set()
    for subject in _all(generation):
        if subject.bucket not in seen:
            seen.add(subject.bucket)
            yield subject


def _all(generation: int) -> Iterator[Subject]:
    yield from _rows(generation)
    yield from _one_row(generation)
    yield from _matmul()
    yield from _attention(generation)
    yield from (
        Subject(draw.BUILDS[0], _drawn),
        Subject(argmax.BUILDS[0], lambda: _bound(argmax.KERNELS[0].run, _random(1, 128256), greedy=True)),
    )


def _bound(run: Callable[..., Any], *given: Any, **named: Any) -> Call:
    return lambda: run(*given, **named)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def _matrix(name: str, outputs: int, inputs: int, experts: int = 0) -> Weight:
    shape = (*((experts,) if experts else ()), outputs, inputs)
    dense = _random(*shape) / inputs**0.5
    if name == "plain":
        return Weight("plain", shape, (dense,), lambda *_: dense)
    return PACKED[name].weight(dense, None)


def _rows(generation: int) -> Iterator[Subject]:
    """Yield the subjects of kernels that read and write each element once."""
    for width in (1024, 2048, 4096, 8192):
        spec = Norm(kind="rms", eps=1e-5)
        yield Subject(
            norm.build_of(width, layer=False),
            lambda w=width, s=spec: _bound(norm.run_norm, _random(64, w), _random(w), None, spec=s),  # type: ignore[misc]
        )
    for build, gated, width in ((activation.BUILDS[0], True, 28672), (activation.BUILDS[1], False, 16384)):
        yield Subject(
            build,
            lambda g=gated, w=width: _bound(activation.activation, _random(512, w), name="silu", gated=g),  # type: ignore[misc]
        )
    for heads, dim in ((32, 128), (8, 128), (32, 64), (8, 64)):
        yield Subject(rope.build_of(heads, dim, dim // 2, False), lambda h=heads, d=dim: _rotated(h, d))  # type: ignore[misc]
    for heads, kv_heads, dim in HEADS:
        for int8 in (False, True):
            yield Subject(
                rope_cache.build_of(heads, dim, int8=int8),
                lambda s=(heads, kv_heads, dim), i=int8: _kept(s, i),  # type: ignore[misc]
            )
    if generation >= 89:
        yield Subject(fp8_rows.BUILDS[0], _rounded)
    for name in NAMES[1:]:
        yield Subject(unpack.build_of(name), lambda n=name: _unpacked(n))  # type: ignore[misc]


def _rotated(heads: int, dim: int) -> Call:
    angles = torch.rand(2048, dim // 2, device=DEVICE)
    run = rope.KERNELS[0].run
    return _bound(run, _random(2048, heads, dim), angles.cos(), angles.sin(), interleaved=False)


def _rounded() -> Call:
    matrix = linear.matrix_of(_matrix("fp8", 4096, 4096))
    return _bound(fp8_rows.times_rounded, _random(2048, 4096), matrix, Rounding(codes="fp8"))


def _kept(shape: tuple[int, int, int], int8: bool) -> Call:
    heads, kv_heads, dim = shape
    angles, caches = torch.rand(2048, dim // 2, device=DEVICE), _cache(kv_heads, dim, 2048, int8)
    q, k, v = (_random(2048, count, dim) for count in (heads, kv_heads, kv_heads))
    tables, slots = (angles.cos(), angles.sin()), torch.arange(2048, device=DEVICE)
    run = rope_cache.KERNELS[0].run
    return _bound(run, q, k, v, *caches, slots, tables=tables, interleaved=False)


def _unpacked(name: str) -> Call:
    matrix = linear.matrix_of(_matrix(name, 14336, 4096))
    return _bound(unpack.unpacked, matrix, 4096, torch.bfloat16)


ROWS = {
    2048: (("norm", 3072), ("", 2048), ("norm and gate", 16384), ("", 32768)),
    4096: (("norm", 6144), ("", 4096), ("norm and gate", 28672), ("", 32768)),
    8192: (("", 2048),),
    14336: (("", 4096),),
}
"""By the inputs of a matrix: pairs of fused neighbours and outputs; a head represents wider ones."""


def _one_row(generation: int) -> Iterator[Subject]:
    for name in NAMES:
        for inputs, shapes in ROWS.items():
            for around, outputs in shapes:
                yield Subject(
                    one_row.build_of(name, inputs, around, narrow=outputs <= 8192, number=generation),
                    lambda n=name, i=inputs, a=around, o=outputs: _times(n, i, a, o),  # type: ignore[misc]
                )


def _times(name: str, inputs: int, words: str, outputs: int) -> Call:
    matrix, gated = linear.matrix_of(_matrix(name, outputs, inputs)), "gate" in words
    around = Around()
    if "norm" in words:
        kind = KINDS["silu"] if gated else -1
        around = Around(1, 1e-5, 0.0, _random(inputs), activation=kind, gated=gated)
    return _bound(one_row.times_row, _random(1, inputs), matrix, around)


def _matmul() -> Iterator[Subject]:
    for name in NAMES:
        for bucket, rows in ((16, 8), (32, 32), (64, 64)):
            yield Subject(
                matmul.build_of(name, FORMATS[name], bucket, hand=name != "plain"),
                lambda n=name, r=rows: _bound(  # type: ignore[misc]
                    matmul.times_matrix, _random(r, 4096), linear.matrix_of(_matrix(n, 28672, 4096)), Around()
                ),
            )
    for name in ("plain", "int8", "int4"):
        for rows in (16, 64):
            yield Subject(
                matmul.build_of(name, FORMATS[name], rows, experts=True, hand=name != "plain"),
                lambda n=name, r=rows: _experts(n, r),  # type: ignore[misc]
            )
    yield Subject(matmul.BUILDS[0], lambda: _times_many(8))


def _times_many(rows: int) -> Call:
    matrix = linear.matrix_of(_matrix("int8", 28672, 4096))
    around = Around(activation=KINDS["silu"], gated=True)
    return _bound(matmul.times_matrix, _random(rows, 4096), matrix, around)


def _experts(name: str, rows: int) -> Call:
    weight = _matrix(name, 4096, 2048, experts=8)
    chosen = torch.arange(8 * rows, device=DEVICE).remainder(8).view(-1, 2)
    pairs = moe.sort_pairs(chosen, 8)
    matrix = Matrix(list(weight.planes), None, FORMATS[name], 1, 4096)
    return _bound(matmul.times_matrix, _random(len(chosen), 2048), matrix, Around(), pairs=pairs, each=2)


def _attention(generation: int) -> Iterator[Subject]:
    at = (80, 90).index(generation)
    for heads, kv_heads, dim in HEADS:
        for int8 in (False, True):
            shape, own = (heads, kv_heads, dim), {"int8": int8}
            yield Subject(
                decode_attention.build_of(*shape, **own, number=generation),
                lambda s=shape, i=int8: _step(s, i),  # type: ignore[misc]
            )
            for what, queries, splits in (("decode", 1, 16), ("prefill", 2048, 1)):
                yield Subject(
                    attention.build_of(what, *shape, queries, splits, **own)[at],
                    lambda s=shape, i=int8, q=queries: _attended(s, i, q),  # type: ignore[misc]
                )


def _cache(kv_heads: int, dim: int, length: int, int8: bool) -> tuple[CachePart, CachePart]:
    shape = (length // _PAGE + 1, _PAGE, kv_heads, dim)
    if not int8:
        return _random(*shape), _random(*shape)

    def part() -> Int8Cache:
        codes = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
        return Int8Cache(codes, torch.rand(shape[:3], device=DEVICE) / 64)

    return part(), part()


def _steps(queries: int, length: int) -> Step:
    """Make a step of one sequence of `length` tokens, of which the last `queries` are new."""
    count = {"dtype": torch.int32, "device": DEVICE}
    new = torch.arange(length - queries, length, device=DEVICE)
    return Step(
        token_ids=torch.zeros_like(new),
        positions=new,
        query_starts=torch.tensor([0, queries], **count),  # type: ignore[arg-type]
        kv_lens=torch.tensor([length], **count),  # type: ignore[arg-type]
        block_table=torch.arange(1, length // _PAGE + 1, **count)[None],  # type: ignore[call-overload]
        slots=new + _PAGE,
        logit_rows=new[-1:] * 0,
        max_query_len=queries,
        max_kv_len=length,
    )


def _attended(shape: tuple[int, int, int], int8: bool, queries: int) -> Call:
    heads, kv_heads, dim = shape
    length = max(_LENGTH, queries)
    caches, mask = _cache(kv_heads, dim, length, int8), AttentionMask(dim**-0.5)
    run = attention.KERNELS[0].run
    return _bound(run, _random(queries, heads, dim), *caches, _steps(queries, length), mask=mask)


def _step(shape: tuple[int, int, int], int8: bool) -> Call:
    heads, kv_heads, dim = shape
    angles = torch.rand(1, dim // 2, device=DEVICE)
    how = decode_attention.Heads(heads, kv_heads, dim, rope=(angles.cos(), angles.sin()))
    qkv, caches = _random(1, (heads + 2 * kv_heads) * dim), _cache(kv_heads, dim, _LENGTH, int8)
    step, mask = _steps(1, _LENGTH), AttentionMask(dim**-0.5)
    arrived = torch.zeros(kv_heads, dtype=torch.int32, device=DEVICE)

    def run() -> Tensor:
        arrived.zero_()
        return decode_attention.attend_one(qkv, how, caches, step, mask, arrived)

    return run


def _drawn() -> Call:
    scores = 3 * torch.randn(8, 128256, device=DEVICE)
    numbers = Warp(0.8, top_k=50, top_p=0.95).numbers(128256, scores.device)
    return _bound(draw.KERNELS[0].run, scores, torch.empty_like(scores).exponential_(), numbers)
