"""Two hosts that only see each other over a network generate the tokens of one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "two_hosts"
NOT_PERMITTED = 77


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("ip") is None, reason="needs Linux and iproute2")
def test_two_network_namespaces_generate_together() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ,
    )
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(": SAME") == 2
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout
