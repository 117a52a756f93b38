"""Prints how the engine runs each type of model: `python -m tests.architectures [TYPE | KIND ...]`."""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections import Counter

import torch
import transformers

from tests.architectures.sweep import TOLERANCE, sweep
from tests.architectures.tiny import model_types


def main(chosen: list[str]) -> int:
    """Print one line per type, then the counts of levels and the failures by name."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    levels: Counter[str] = Counter()
    failures = []
    for model_type, kind in model_types():
        if chosen and model_type not in chosen and kind not in chosen:
            continue
        start = time.perf_counter()
        try:
            result = sweep(model_type, kind)
            failed = "" if result.error <= TOLERANCE else f"the logits are off by {result.error:.2g}"
            level, line = result.level, f"{result.error:.1e}  {result.tokens}"
            line = result.why if level == "-" else line
            if model_type in chosen:
                print(result.report)
        except Exception as error:
            level, line = "failed", ""
            failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if model_type in chosen:
                traceback.print_exc()
        levels[level] += 1
        if failed:
            failures.append(f"{model_type} ({kind}): {failed}")
        seconds = time.perf_counter() - start
        print(f"{model_type:28} {kind:10} {level:7} {seconds:5.2f} s  {failed or line}", flush=True)
    print(f"\ntransformers {transformers.__version__}, levels: {dict(sorted(levels.items()))}")
    print(f"{len(failures)} failures", *failures, sep="\n  ")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
