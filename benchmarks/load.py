"""Time and memory that `init_inference` adds to loading, for a model of a billion parameters.

Every measurement is a fresh process; the checkpoint is in the page cache, except for `cold`. The ways of
loading a model differ in what `load_s` includes:

    mapped      loaded in its stored dtype: transformers maps the file and reads nothing, so the first pass
                over the weights is part of `init_inference`, and reads the file without mapping more
    read        like `mapped`, but all weights are read once before; `load_s` includes that
    cold        like `read`, but the file is only on disk, as when a model is loaded for the first time
    converted   loaded in another dtype than the stored one: the weights are in the process's own memory

The model's class is imported before the clock starts. `pass_s` is one more pass over the loaded weights,
which `init_inference` cannot avoid, because it refuses NaN and infinity before it begins.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import LLAMA_1B, LLAMA_TINY, make_llama
from benchmarks.request import Request

__all__ = ["measure"]

_REPEAT = 3


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each dtype and each way to load."""
    quick = request.quick
    rows = []
    for stored in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory(prefix="slipstream-load-") as folder:
            make_llama(LLAMA_TINY if quick else LLAMA_1B, Path(folder), getattr(torch, stored))
            other = "bfloat16" if stored == "float32" else "float32"
            for way, dtype in (
                ("mapped", stored),
                ("read", stored),
                ("cold", stored),
                ("converted", other),
            ):
                runs = [
                    _in_a_process(folder, dtype, way)
                    for _ in range(1 if quick else request.rounds or _REPEAT)
                ]
                rows.append(_row(dtype, way, runs))
    yield "load", {"rows": rows}


def _in_a_process(folder: str, dtype: str, way: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.load", folder, dtype, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    run: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return run


def _row(dtype: str, way: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {
        "dtype": dtype,
        "way": way,
        "model_bytes": int(median["model_bytes"]),
        "load_s": median["load_s"],
        "init_s": median["init_s"],
        "init_s_range": [min(run["init_s"] for run in runs), max(run["init_s"] for run in runs)],
        "pass_s": median["pass_s"],
        "init_to_load": median["init_s"] / median["load_s"],
        "peak_growth": median["peak_bytes"] / median["model_bytes"],
        "kept_growth": median["kept_bytes"] / median["model_bytes"],
        "repeat": len(runs),
    }


def _one(folder: str, dtype: str, way: str) -> dict[str, float]:
    """Load the model and build the engine once in this process."""
    from transformers import LlamaForCausalLM

    import slipstream
    from slipstream.devices import choose

    device = choose()
    if way == "cold":
        _forget_pages(Path(folder))
    start = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    if way in ("read", "cold"):
        _pass_over(model)
    loaded = time.perf_counter()
    size = sum(parameter.nbytes for parameter in model.parameters())
    device.reset_peak()
    before = device.memory().used
    begin = time.perf_counter()
    engine = slipstream.init_inference(model, dtype=getattr(torch, dtype), replace_with_kernel_inject=True)
    end = time.perf_counter()
    memory = device.memory()
    if engine.report().level != "block":
        raise RuntimeError(f"the llama was not fused: {engine.report()}")
    again = time.perf_counter()
    _pass_over(engine.module)
    return {
        "model_bytes": size,
        "load_s": loaded - start,
        "init_s": end - begin,
        "pass_s": time.perf_counter() - again,
        "peak_bytes": memory.peak - before,
        "kept_bytes": memory.used - before,
    }


def _forget_pages(folder: Path) -> None:
    """Evict the checkpoint's files from the system's page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _pass_over(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.sum()


if __name__ == "__main__":
    print(json.dumps(_one(sys.argv[1], sys.argv[2], sys.argv[3])))
