"""Decode on the CPU: transformers eager, the layers one by one, and one native call in each format.

The rows alternate in one process, a few tokens each, after a prompt of 128 tokens; figures are medians.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import slipstream
from benchmarks.models import LLAMA_TINY
from benchmarks.request import Request
from slipstream.engine.generation.runner import Runner, make_step
from slipstream.engine.generation.schedule import Chunk
from slipstream.formats import FORMATS
from slipstream.model.block.paged_cache import BLOCK_SIZE
from slipstream.model.frame.run_stack import run_stack
from slipstream.model.weights.packed import weight_of

SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PROMPT, TOKENS = 128, 4

Decode = Callable[[], None]


def eager(model: LlamaForCausalLM, batch: int) -> Decode:
    """Return a function that runs `TOKENS` steps of transformers and crops the cache back to the prompt."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(3, 1000, (batch, PROMPT))
    model(ids, past_key_values=cache, use_cache=True)

    def decode() -> None:
        token = ids[:, -1:]
        for _ in range(TOKENS):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        cache.crop(-TOKENS)

    return decode


def engine(runner: Runner, batch: int) -> Decode:
    """Return a function that runs `TOKENS` steps as `engine.generate` does, over a random cache."""
    pages = -(-(PROMPT + TOKENS) // BLOCK_SIZE)
    cache = runner.new_cache(batch * pages)
    for pair in cache.layers:
        for part in pair:
            part.normal_()
    places = [list(range(row * pages, (row + 1) * pages)) for row in range(batch)]

    def decode() -> None:
        tokens = torch.randint(3, 1000, (batch,))
        for i in range(TOKENS):
            chunks = [Chunk(row, PROMPT + i, 1, True) for row in range(batch)]
            step = make_step(chunks, lambda c: tokens[c.row : c.row + 1], places, torch.device("cpu"))  # noqa: B023
            tokens = runner(step, cache).argmax(-1)

    return decode


def read_rate() -> float:
    """Return the GB/s of a sum over 512 MiB, the best of eight."""
    data = torch.ones(1 << 27)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * 4 / min(times) / 1e9


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each implementation, dtype and batch size."""
    rows = []
    shape, rounds = (LLAMA_TINY, 1) if request.quick else (SMOLLM2_135M, request.rounds or 9)
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (1, 8):
                rows += _rows(shape, dtype, batch, rounds)
    yield "decode_cpu", {"prompt": PROMPT, "rows": rows}


def _bytes_read(runner: Runner) -> int:
    """Return the bytes of the matrices that a step reads: those of the layers and the head."""
    weights = [weight for block in runner.blocks for weight in block.weights.matrices.values()]
    return sum(weight.nbytes for weight in (*weights, weight_of(runner.frame.head)))


def _rows(shape: dict[str, Any], dtype: torch.dtype, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Return one row per implementation, whose measurements alternate."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval().to(dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    decoders = {"transformers eager": eager(model, batch)}
    sizes = {"transformers eager": size, "layers one by one": size}
    for name in FORMATS:
        quant = {} if name == "plain" else {"quant": name}
        ours = slipstream.init_inference(
            copy.deepcopy(model), dtype=dtype, replace_with_kernel_inject=True, **quant
        )
        native = ours._built.runner
        assert native is not None
        if name == "plain":
            plain = Runner(native.frame, native.blocks, native.names, stack=run_stack)
            decoders["layers one by one"] = engine(plain, batch)
        row = f"{name} ({ours.report().layers[0].kernels['stack']})"
        decoders[row] = engine(native, batch)
        sizes[row] = _bytes_read(native)
    times: dict[str, list[float]] = {name: [] for name in decoders}
    rates = []
    for turn in range(rounds + 1):
        rates.append(read_rate())
        for name, decode in decoders.items():
            start = time.perf_counter()
            decode()
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - start) / TOKENS)
    base = statistics.median(times["transformers eager"])
    rate = statistics.median(rates)
    rows = []
    for name, each in times.items():
        median = statistics.median(each)
        rows.append(
            {
                "row": name,
                "dtype": str(dtype).removeprefix("torch."),
                "batch": batch,
                "ms_per_step": round(median * 1e3, 2),
                "ms_least": round(min(each) * 1e3, 2),
                "tokens_per_second": round(batch / median, 1),
                "times_eager": round(base / median, 2),
                "weights_gb_per_second": round(sizes[name] / median / 1e9, 1),
                "read_gb_per_second": round(rate, 1),
            }
        )
    return rows
