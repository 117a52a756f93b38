"""Weights of engines on several ranks: streamed from files into empty models, by every rank its own part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families.sweep import VARIANTS, label
from tests.parallel.pool import Pool, results
from tests.parallel.test_families import INJECTED, named

JOBS = "tests.parallel.weight_jobs"

OWN_CODE: dict[str, Any] = {}
STREAMED = [
    ("llama", OWN_CODE, 3),
    ("gpt2", OWN_CODE, 2),  # Conv1D, a tied head
    ("bloom", {"quant": "int8"}, 2),  # rows by heads, packed inputs that share a scale
    ("mixtral", OWN_CODE, 2),  # written with a matrix per expert
    ("t5", {"quant": "int8"}, 2),
    ("deepseek_v2", INJECTED, 2),  # layers that stay as they are beside fused ones
    ("lfm2 convolutions", INJECTED, 3),  # parts of fused layers that stay as they are
]


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [case for case in STREAMED if case[0] in map(label, VARIANTS)],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_empty_model_is_filled_by_ranks_that_run_its_own_code(
    pool: Pool, tmp_path: Path, name: str, settings: dict[str, Any], size: int
) -> None:
    job = (f"{JOBS}:streamed", named(name), size, settings, str(tmp_path))
    for row in results(pool.run(*job, ranks=size)):
        assert row["error"] == 0.0  # the same numbers in the same order
        assert row["same"]
        assert any("added up" in how or "joined" in how for _, how in row["rows"])
