"""The GPU's kernels, run on a GPU where there is one, and otherwise by Triton's interpreter on the CPU.

`scripts/test` runs this folder by itself with each supported version of Triton, once with TRITON_INTERPRET=1
(what kernels compute) and once with 0 (what they compile to): a process does one or the other. Elsewhere it
is left out.

With GPU_SUITE=brief, which it sets for all versions but the oldest, what another version cannot change is
left out: planted faults (they prove the comparisons, whose code is the same), whole engines (of kernels that
are asked one by one), float16 (the interpreter computes it as numpy does, and compiled it differs from
bfloat16 by a suffix), and the AMD canary.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a brief run does without."""
    if os.environ.get("GPU_SUITE") != "brief":
        return
    left = [item for item in items if HERE in item.path.parents and _is_of_any_version(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]


def _is_of_any_version(item: pytest.Item) -> bool:
    if item.path.name in ("test_faults.py", "test_rehearsal.py"):
        return True
    if item.path.name == "test_kernels.py":
        return item.callspec.params.get("dtype") == torch.float16  # type: ignore[attr-defined]
    return item.path.name == "test_builds.py" and item.name.endswith("gfx942]")
