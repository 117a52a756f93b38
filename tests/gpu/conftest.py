"""The GPU's kernels, run on a GPU where there is one, and otherwise by Triton's interpreter on the CPU.

`scripts/test` runs this folder by itself with each supported version of Triton, once with TRITON_INTERPRET=1
(what kernels compute) and once with 0 (what they compile to): a process does one or the other. Elsewhere it
is left out.
"""

from __future__ import annotations

import os

import torch

mode = os.environ.get("TRITON_INTERPRET")
if mode == "1":
    from tests.gpu.repair import repair

    repair()
    collect_ignore = ["test_builds.py"]
elif mode == "0":
    collect_ignore = ["test_repair.py", "test_kernels.py"]
elif torch.cuda.is_available():
    collect_ignore = ["test_builds.py", "test_repair.py"]
else:
    collect_ignore_glob = ["test_*.py"]
