"""Memory on the host: what is resident now, and the most since the peak was reset."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from slipstream.devices.cpu import CpuDevice

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak cannot be reset")
def test_a_new_peak_knows_nothing_of_what_was_freed_before() -> None:
    device = CpuDevice()
    torch.ones(64 * MIB, dtype=torch.int8).sum()
    device.reset_peak()
    calm = device.memory()
    assert calm.peak < calm.used + 16 * MIB
    torch.ones(64 * MIB, dtype=torch.int8).sum()
    assert device.memory().peak > calm.used + 48 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak is the system's to tell")
def test_a_peak_is_the_processes_own_and_not_that_of_who_started_it() -> None:
    held = torch.ones(512 * MIB, dtype=torch.int8)
    code = "from slipstream.devices.cpu import CpuDevice as D; m = D().memory(); print(m.peak - m.used)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(answer.stdout.split()[-1]) < 128 * MIB
    assert held.numel() == 512 * MIB
