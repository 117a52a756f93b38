"""Torch's idle threads go home before a native call of a whole model, and come back when torch needs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, time, torch
from slipstream.kernels.cpu.library import rest_torch
torch.set_num_threads(2)
x = torch.arange(1 << 20, dtype=torch.float32)
for _ in range(2):
    assert float((x + 1)[-1]) == 1 << 20
    before = len(os.listdir("/proc/self/task"))
    rest_torch()
    rest_torch()
    until = time.monotonic() + 10  # a thread that has been joined is listed for a moment longer
    while len(os.listdir("/proc/self/task")) == before and time.monotonic() < until:
        time.sleep(0.01)
    print(before - len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list its threads")
def test_idle_threads_of_torch_end_and_come_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


ALONE = """
import os, torch, torch.nn.functional as F
from slipstream.kernels.cpu.library import rest_torch, torch_alone
torch.set_num_threads(2)
x = torch.randn(64, 512)
count = lambda: len(os.listdir("/proc/self/task"))
F.layer_norm(x, (512,))
rest_torch()
before = count()
try:
    with torch_alone(), torch_alone():
        F.layer_norm(x, (512,))
        print(count() - before, torch.get_num_threads())
        raise KeyError
except KeyError:
    print(torch.get_num_threads())
F.layer_norm(x, (512,))
print(count() - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list its threads")
def test_torch_alone_starts_no_threads_and_gives_them_back() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "2", "1"]
