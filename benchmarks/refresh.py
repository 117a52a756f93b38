"""The cost of new weights in a built engine, compared with building one: a billion parameters, in memory.

Both models are in the process's own memory, so neither a disk nor the first access to a mapped file is
measured. `build_s` is `init_inference` of the model, `refresh_s` is `engine.refresh_weights(other)` with its
checks, and `copy_s` is the lower bound: copying every tensor once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import slipstream
from benchmarks.models import LLAMA_1B, LLAMA_TINY
from benchmarks.request import Request

__all__ = ["PARTS", "measure"]

_ROWS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "int8": (torch.bfloat16, {"quant": "int8"}),
    "int4": (torch.bfloat16, {"quant": "int4"}),
}
PARTS = tuple(_ROWS)
"""The values that `--only` accepts."""

_REPEAT = 5


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each dtype and weight format."""
    shape = LLAMA_TINY if request.quick else LLAMA_1B
    rounds = 2 if request.quick else request.rounds or _REPEAT
    rows = [_row(name, shape, rounds) for name in _ROWS if not request.only or name in request.only]
    yield "refresh", {"rows": rows}


def _row(name: str, shape: dict[str, Any], rounds: int) -> dict[str, Any]:
    dtype, settings = _ROWS[name]
    model, other = (_random(shape, dtype, seed) for seed in (0, 1))
    size = sum(parameter.nbytes for parameter in other.parameters())
    start = time.perf_counter()
    engine = slipstream.init_inference(model, dtype=dtype, replace_with_kernel_inject=True, **settings)
    built = time.perf_counter() - start
    refreshes = [_seconds(lambda: engine.refresh_weights(other)) for _ in range(rounds)]
    with torch.no_grad():
        probe = torch.tensor([[1, 2, 3]])
        expected, got = other(input_ids=probe).logits, engine(input_ids=probe).logits
    # Copy from one model's memory to the other's, as a refresh does.
    engine.destroy()
    copies = [_copy(other, model) for _ in range(rounds)] if not settings else [0.0]
    median = statistics.median(refreshes)
    return {
        "weights": name,
        "model_bytes": size,
        "build_s": built,
        "refresh_s": median,
        "refresh_s_range": [min(refreshes), max(refreshes)],
        "copy_s": statistics.median(copies) or None,
        "refresh_to_build": median / built,
        "off": float((got - expected).abs().max() / expected.abs().max()),
        "repeat": rounds,
    }


def _random(shape: dict[str, Any], dtype: torch.dtype, seed: int) -> nn.Module:
    """Make a model whose matrices repeat one block of random numbers: drawing a billion takes a minute."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    block = torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            for part in parameter.view(-1).split(len(block)):
                part.copy_(block[: len(part)] * parameter.shape[-1] ** -0.5)
    return model.eval()


def _copy(source: nn.Module, target: nn.Module) -> float:
    pairs = list(zip(source.parameters(), target.parameters(), strict=True))

    def run() -> None:
        with torch.no_grad():
            for tensor, destination in pairs:
                destination.copy_(tensor)

    return _seconds(run)


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
