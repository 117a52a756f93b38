"""The GPU's kernels, run on a GPU where there is one, and otherwise by Triton's interpreter on the CPU.

`scripts/test` runs this folder by itself with each supported version of Triton, once with TRITON_INTERPRET=1
(what kernels compute) and once with 0 (what they compile to): a process does one or the other. Elsewhere it
is left out.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

HERE = Path(__file__).parent
VALUES = {file.name for file in HERE.glob("test_*.py")} - {"test_builds.py"}

mode = os.environ.get("TRITON_INTERPRET")
if mode == "1":
    from tests.gpu.repair import repair

    repair()
    collect_ignore = ["test_builds.py"]
elif mode == "0":
    collect_ignore = sorted(VALUES)
elif torch.cuda.is_available():
    collect_ignore = ["test_builds.py", "test_repair.py"]
else:
    collect_ignore = ["test_builds.py", *sorted(VALUES)]
