"""Decode and prefill on a GPU: this engine in each format and transformers, with shares of the limits.

Models have random weights and the shapes of Llama 3.2 1B and Llama 3.1 8B, in bfloat16. A decode row's share
is the bytes that a step must read, divided by its time and the measured copy rate; a prefill row's share is
the operations divided by time and the measured rate of a bfloat16 product. Without a GPU a tiny model runs,
only to test the benchmark.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import slipstream
from benchmarks.models import LLAMA_TINY
from benchmarks.request import Request

__all__ = ["measure"]

_LLAMA_3: dict[str, Any] = {"num_key_value_heads": 8, "num_attention_heads": 32, "vocab_size": 128256}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {**_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "tiny": {**LLAMA_TINY, "num_hidden_layers": 2},
}
FORMATS = ("bf16", "int8", "int4", "fp8", "fp6")
BATCHES, PROMPT, NEW = (1, 8, 32), 128, 64


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a model's file again after each new row; `--only 1b` or `--only 8b/int4` selects rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    quick = request.quick or device.type == "cpu"
    limits = {"copy_gb_per_second": copy_rate(device, quick), "tflops": product_rate(device, quick)}
    for name in ("tiny",) if quick else ("8b", "1b"):
        wanted = [o.partition("/")[2] for o in request.only if o.partition("/")[0] == name]
        if request.only and not wanted:
            continue
        rows: list[dict[str, Any]] = []
        for row in _rows(name, device, limits, request.rounds or (1 if quick else 4), set(wanted) - {""}):
            rows.append(row)
            print(row, flush=True)
            yield f"gpu_{name}", {**limits, "prompt": PROMPT, "rows": rows}
        _let_go(device)


def _let_go(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Return the median time of `rounds` runs, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def copy_rate(device: torch.device, quick: bool = False) -> float:
    """Return the GB/s of a copy of 1 GiB, counting reads and writes."""
    source = torch.empty(1 << (20 if quick else 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device, 9) / 1e9


def product_rate(device: torch.device, quick: bool = False) -> float:
    """Return the TFLOP/s of a product of square matrices in bfloat16."""
    size = 128 if quick else 8192
    a = torch.randn(size, size, device=device).to(torch.bfloat16)
    return 2 * size**3 / seconds(lambda: a @ a, device, 9) / 1e12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _rows(
    name: str, device: torch.device, limits: dict[str, float], rounds: int, only: set[str]
) -> Iterator[dict[str, Any]]:
    model = _made(name, device)
    numbers = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    untied = embedding is not model.lm_head.weight
    dense, head = (numbers - (embedding.numel() if untied else 0)) * 2, embedding.numel() * 2
    tiny = name == "tiny"
    subjects: dict[str, Callable[[], Any]] = {"transformers eager": lambda: model}
    subjects |= {f"slipstream {f}": lambda f=f: _engine(model, f, device) for f in FORMATS}  # type: ignore[misc]
    if not tiny:  # last, because it leaves a compiled forward behind; it takes a minute for each batch size
        subjects["transformers static + compile"] = lambda: model
    base: dict[tuple[str, int], float] = {}
    for subject, make in subjects.items():
        if only and subject.startswith("slipstream") and subject.split()[1] not in only:
            continue
        try:
            made = make()
        except Exception as error:  # noqa: BLE001 - one subject that fails must not take the others with it
            yield {"model": name, "row": subject, "error": _told(error)}
            continue
        extra = {"cache_implementation": "static"} if "static" in subject else {}
        weights = dense if made is model else _bytes(made)
        batches = BATCHES[: 1 if tiny or extra else 3]
        for what, batch in [*(("decode", batch) for batch in batches), ("prefill", 1)]:
            row = {"model": name, "row": subject, "what": what, "batch": batch}
            try:
                row |= _decode(made, batch, device, rounds, extra, tiny) if what == "decode" else {}
                row |= _prefill(made, device, rounds, tiny) if what == "prefill" else {}
            except Exception as error:  # noqa: BLE001 - likewise
                yield {**row, "error": _told(error)}
                continue
            base.setdefault((what, batch), row["ms"])
            row["times_eager"] = round(base[what, batch] / row["ms"], 2)
            if what == "decode":
                read = weights + batch * _cache_bytes(model.config) * (PROMPT + NEW // 2)
                row["share_of_bandwidth"] = round(read / row["ms"] / 1e6 / limits["copy_gb_per_second"], 3)
            else:
                # A weight has two bytes and takes two operations; the head is for the last token only.
                done = (dense - head) * row["tokens"] + head
                row["share_of_rate"] = round(done / row["ms"] / 1e9 / limits["tflops"], 3)
            yield row
        if made is not model:
            made.destroy()
        del made
        _let_go(device)


def _made(name: str, device: torch.device) -> Any:
    """Make a random model in bfloat16 without an end-of-text token."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**{**SHAPES[name], "eos_token_id": None})).eval()
    finally:
        torch.set_default_dtype(before)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _engine(model: Any, name: str, device: torch.device) -> Any:
    settings: dict[str, Any] = {"enable_cuda_graph": device.type == "cuda", "max_out_tokens": 4096}
    if name != "bf16":
        settings["quant"] = name
    return slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.bfloat16, replace_with_kernel_inject=True, **settings
    )


def _bytes(engine: Any) -> int:
    """Return the bytes of the matrices that a step reads: those of the layers and the head."""
    runner = engine._built.runner
    return sum(
        w.nbytes
        for w in (
            *(w for block in runner.blocks for w in block.weights.matrices.values()),
            runner.frame.matrices()["head"],
        )
    )


def _cache_bytes(config: Any) -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    return int(4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


def _decode(
    made: Any, batch: int, device: torch.device, rounds: int, extra: dict[str, Any], tiny: bool
) -> dict[str, Any]:
    ids = torch.randint(3, 1000, (batch, PROMPT), device=device)

    def run(count: int) -> None:
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        made.generate(ids, **options, **extra)

    few, many = (2, 6) if tiny else (4, NEW)
    step = (seconds(lambda: run(many), device, rounds) - seconds(lambda: run(few), device, rounds)) / (
        many - few
    )
    return {"ms": round(step * 1e3, 4), "tokens_per_second": round(batch / step, 1)}


def _prefill(made: Any, device: torch.device, rounds: int, tiny: bool) -> dict[str, Any]:
    tokens = 64 if tiny else 2048
    ids = torch.randint(3, 1000, (1, tokens), device=device)
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    took = seconds(lambda: made.generate(ids, **options), device, rounds)
    return {"ms": round(took * 1e3, 3), "tokens": tokens, "tokens_per_second": round(tokens / took, 1)}
