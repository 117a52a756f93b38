"""Attention on the CPU: the native kernels and torch's, in operations and in bytes per second.

Measurements of the rows of one shape alternate in one process; figures are medians. Prefill is causal over
one sequence in a paged cache; torch gets contiguous tensors and `is_causal`, so it does not have to gather.
Decode is one token of one sequence; it goes through several layers' caches, so that none is still in a CPU
cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.request import Request
from slipstream.kernels.cpu.attention import NativeAttention
from slipstream.kernels.cpu.library import Library, load
from slipstream.kernels.cpu.paged_attention import native_paged_attention
from slipstream.model.block.paged_cache import BLOCK_SIZE
from slipstream.ops.step import AttentionMask, Step

__all__ = ["measure"]

HEADS = ((32, 4, 64), (9, 3, 64))
"""Heads, kv heads and head dim of a 1.1-billion-parameter Llama and of SmolLM2-135M."""

ENCODERS = ((12, 32, 32, 128), (12, 32, 1, 16), (12, 64, 8, 128))
"""Heads, head dim, batch and tokens: MiniLM's two shapes, and BERT's."""

Run = Callable[[], object]


def step_of(tokens: int, kv_len: int) -> Step:
    """Make a step of the last `tokens` tokens of one sequence whose pages are in order."""
    pages = -(-kv_len // BLOCK_SIZE)
    positions = torch.arange(kv_len - tokens, kv_len)
    return Step(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=positions,
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        kv_lens=torch.tensor([kv_len], dtype=torch.int32),
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        slots=positions,
        logit_rows=torch.tensor([tokens - 1]),
        max_query_len=tokens,
        max_kv_len=kv_len,
    )


def times_of(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round but the first, by name of the run."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def rows_of(facts: dict[str, Any], times: dict[str, list[float]], work: float) -> list[dict[str, Any]]:
    """Return one row per implementation; `work` is the amount of work in units of 10^9, for the rate."""
    base = statistics.median(next(iter(times.values())))
    return [
        {
            "row": name,
            **facts,
            "ms": statistics.median(each) * 1e3,
            "ms_range": [min(each) * 1e3, max(each) * 1e3],
            "giga_per_second": work / statistics.median(each),
            "times_torch": base / statistics.median(each),
        }
        for name, each in times.items()
    ]


def prefill(shape: tuple[int, int, int], tokens: int, rounds: int, library: Library) -> list[dict[str, Any]]:
    """Measure causal attention of one sequence in bfloat16; the rate counts the necessary operations."""
    heads, kv_heads, dim = shape
    q = torch.randn(tokens, heads, dim).bfloat16()
    pages = -(-tokens // BLOCK_SIZE)
    k, v = (torch.randn(pages, BLOCK_SIZE, kv_heads, dim).bfloat16() for _ in range(2))
    step, mask = step_of(tokens, tokens), AttentionMask(dim**-0.5)

    def rows(cache: Tensor) -> Tensor:
        return cache.flatten(0, 1)[:tokens].transpose(0, 1)[None].contiguous()

    plain = (q.transpose(0, 1)[None].contiguous(), rows(k), rows(v))
    runs: dict[str, Run] = {
        "torch": lambda: F.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=True),
        library.isa: lambda: native_paged_attention(q, k, v, step, mask=mask, library=library),
    }
    work = 4 * heads * dim * tokens * (tokens + 1) / 2 / 1e9
    facts = {"kind": "prefill", "heads": f"{heads}/{kv_heads} x {dim}", "tokens": tokens}
    return rows_of(facts, times_of(runs, rounds), work)


def decode(shape: tuple[int, int, int], context: int, rounds: int, library: Library) -> list[dict[str, Any]]:
    """Measure one token with a long cache in bfloat16; the rate counts the bytes of keys and values."""
    heads, kv_heads, dim = shape
    q = torch.randn(1, heads, dim).bfloat16()
    size = 2 * context * kv_heads * dim * 2
    layers = max(2, (128 << 20) // size)
    shape_ = (-(-context // BLOCK_SIZE), BLOCK_SIZE, kv_heads, dim)
    caches = [tuple(torch.randn(shape_).bfloat16() for _ in range(2)) for _ in range(layers)]
    step, mask = step_of(1, context), AttentionMask(dim**-0.5)

    def by_torch() -> None:
        for pair in caches:
            k, v = (c.flatten(0, 1)[:context].transpose(0, 1)[None] for c in pair)
            F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, enable_gqa=True)

    def native() -> None:
        for k, v in caches:
            native_paged_attention(q, k, v, step, mask=mask, library=library)

    data = torch.ones(32 << 20)
    runs: dict[str, Run] = {"torch": by_torch, library.isa: native}
    facts = {"kind": "decode", "heads": f"{heads}/{kv_heads} x {dim}", "tokens": context}
    rows = rows_of(facts, times_of(runs, rounds), layers * size / 1e9)
    read = times_of({"": data.sum}, rounds)[""]
    return [{**row, "read_giga_per_second": data.nbytes / 1e9 / min(read)} for row in rows]


def encoder(shape: tuple[int, int, int, int], rounds: int, library: Library) -> list[dict[str, Any]]:
    """Measure bidirectional attention over a batch in bfloat16, as in BERT."""
    heads, dim, batch, tokens = shape
    joined = torch.randn(3, batch, tokens, heads, dim).bfloat16()
    q, k, v = (t.transpose(1, 2) for t in joined)
    native = NativeAttention(library)
    given: dict[str, Any] = {"mask": None, "causal": False, "scale": dim**-0.5}

    def by_torch() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    runs: dict[str, Run] = {
        "torch": by_torch,
        library.isa: lambda: native(q, k, v, **given),
    }
    facts = {"kind": "encoder", "heads": f"{heads} x {dim}", "tokens": f"{batch} x {tokens}"}
    work = 4 * batch * heads * dim * tokens**2 / 1e9
    return rows_of(facts, times_of(runs, 30 * rounds), work)


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows for every shape; `quick` measures short ones once.

    Raises:
        RuntimeError: There is no native library.
    """
    library = load()
    if library is None:
        raise RuntimeError("there is no native library to measure; see `slipstream env`")
    quick, rounds = request.quick, 1 if request.quick else request.rounds or 5
    rows = []
    with torch.inference_mode():
        for shape in HEADS:
            for tokens in (64,) if quick else (512, 2048, 8192):
                rows += prefill(shape, tokens, rounds if tokens < 4096 else 2, library)
            for context in (64,) if quick else (1024, 8192, 32768):
                rows += decode(shape, context, rounds, library)
        for encoded in ENCODERS:
            rows += encoder(encoded, rounds, library)
    yield "attention_cpu", {"rows": rows}
