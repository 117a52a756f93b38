"""What `init_inference` costs beside loading, in time and in memory, for a billion parameters.

Every measurement is a fresh process. The checkpoint lies in the page cache, so no disk is measured.
transformers maps a checkpoint and reads nothing until a weight is used: `load_s` is `from_pretrained` alone,
`read_s` the first pass over all weights after it, which `init_inference` or the first token would else pay.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import LLAMA_1B, LLAMA_TINY, make_llama

__all__ = ["measure"]

_REPEAT = 3


def measure(quick: bool) -> list[dict[str, Any]]:
    """Rows for float32 and bfloat16, each with the weights read before `init_inference`, and not."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory(prefix="slipstream-load-") as folder:
            make_llama(LLAMA_TINY if quick else LLAMA_1B, Path(folder), getattr(torch, dtype))
            for read_first in (False, True):
                runs = [_in_a_process(folder, dtype, read_first) for _ in range(1 if quick else _REPEAT)]
                rows.append(_row(dtype, read_first, runs))
    return rows


def _in_a_process(folder: str, dtype: str, read_first: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.load", folder, dtype, str(int(read_first))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    run: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return run


def _row(dtype: str, read_first: bool, runs: list[dict[str, float]]) -> dict[str, Any]:
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    loaded = median["load_s"] + median["read_s"]
    return {
        "dtype": dtype,
        "read_first": read_first,
        "model_bytes": int(median["model_bytes"]),
        "load_s": median["load_s"],
        "read_s": median["read_s"],
        "init_s": median["init_s"],
        "init_s_range": [min(run["init_s"] for run in runs), max(run["init_s"] for run in runs)],
        "init_to_load": median["init_s"] / loaded,
        "peak_growth": median["peak_bytes"] / median["model_bytes"],
        "kept_growth": median["kept_bytes"] / median["model_bytes"],
        "repeat": len(runs),
    }


def _one(folder: str, dtype: str, read_first: bool) -> dict[str, float]:
    """Load and build once in this process."""
    import transformers

    import slipstream
    from slipstream.devices import choose

    device = choose()
    start = time.perf_counter()
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    loaded = time.perf_counter()
    if read_first:
        for parameter in model.parameters():
            parameter.sum()
    read = time.perf_counter()
    size = sum(parameter.nbytes for parameter in model.parameters())
    device.reset_peak()
    before = device.memory().used
    begin = time.perf_counter()
    engine = slipstream.init_inference(model, dtype=getattr(torch, dtype), replace_with_kernel_inject=True)
    end = time.perf_counter()
    memory = device.memory()
    if engine.report().level != "block":
        raise RuntimeError(f"the llama was not fused: {engine.report()}")
    return {
        "model_bytes": size,
        "load_s": loaded - start,
        "read_s": read - loaded,
        "init_s": end - begin,
        "peak_bytes": memory.peak - before,
        "kept_bytes": memory.used - before,
    }


if __name__ == "__main__":
    print(json.dumps(_one(sys.argv[1], sys.argv[2], sys.argv[3] == "1")))
