"""Captured steps and forwards on several ranks, on the device that records."""

from __future__ import annotations

import pytest

from tests.parallel.pool import Pool, results
from tests.parallel.test_families import INJECTED, TOLERANCE, named

JOBS = "tests.parallel.jobs"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_repeat_their_sums_within_captured_steps(pool: Pool, name: str, size: int) -> None:
    rows = results(pool.run(f"{JOBS}:captured", named(name), size, INJECTED, ranks=size))
    for row in rows:
        assert all(row["same"]), row["text"]
        assert row["error"] <= TOLERANCE
        assert row["captures"] >= 2, row["text"]
        assert "captured as graphs" in row["text"]
