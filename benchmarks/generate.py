"""Prefill and decode compared with the original model, for a random Llama in float32 and bfloat16."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

import slipstream
from benchmarks.models import LLAMA_1B, LLAMA_TINY, make_llama
from benchmarks.request import Request
from slipstream.devices import choose
from slipstream.profile.bench import Row, Shape, bench

__all__ = ["measure"]

_SHAPES = ((1, 128, 16), (4, 128, 16))


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each model, dtype and shape; the original and the engine alternate."""
    quick = request.quick
    rows = []
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        with tempfile.TemporaryDirectory(prefix="slipstream-generate-") as folder:
            make_llama(LLAMA_TINY if quick else LLAMA_1B, Path(folder), dtype)
            device = choose()
            original = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(device.torch_device).eval()
            engine = slipstream.init_inference(
                LlamaForCausalLM.from_pretrained(folder, dtype=dtype),
                dtype=dtype,
                replace_with_kernel_inject=True,
            )
            vocabulary = original.config.vocab_size
            for shape in [Shape(*numbers) for numbers in _SHAPES]:
                found = bench(
                    {"transformers": original, "slipstream": engine},
                    shape,
                    device=device,
                    vocabulary=vocabulary,
                    repeat=1 if quick else request.rounds or 3,
                )
                rows += [_flat(row, name) for row in found]
    yield "generate", {"rows": rows}


def _flat(row: Row, dtype: str) -> dict[str, Any]:
    return {
        "name": row.name,
        "dtype": dtype,
        "batch": row.shape.batch,
        "prompt_tokens": row.shape.prompt_tokens,
        "new_tokens": row.shape.new_tokens,
        "prefill": row.prefill.median,
        "prefill_range": [row.prefill.low, row.prefill.high],
        "decode": row.decode.median,
        "decode_range": [row.decode.low, row.decode.high],
        "first_token_s": row.first_token.median,
        "working_bytes": row.working_bytes,
        "repeat": row.repeat,
    }
