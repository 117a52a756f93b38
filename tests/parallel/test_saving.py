"""What several ranks save, any number of them loads; what they cannot do with a whole model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.pool import Failed, Pool, results
from tests.parallel.test_families import named


def test_what_two_ranks_save_loads_on_one_three_and_four(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run("tests.parallel.saving_jobs:save", str(tmp_path), 2, ranks=2)
    assert saved == [None, None], saved
    for size in (1, 3, 4):
        for answer in pool.run("tests.parallel.saving_jobs:load", str(tmp_path), size, ranks=size):
            assert answer == {"checkpoint": True, "described": True, "hollow": True, "packed": True}, answer


JOBS = "tests.parallel.saving_jobs"


@pytest.mark.parametrize("settings", [{"replace_with_kernel_inject": True}, {}], ids=["fused", "own code"])
@pytest.mark.parametrize(
    ("quant", "dtype"), [("int8", torch.bfloat16), ("int4", torch.float32), ("int4", torch.bfloat16)]
)
def test_packed_weights_that_ranks_save_are_those_of_one_process_at_any_degree(
    pool: Pool, tmp_path: Path, quant: str, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    given = (str(tmp_path), quant, dtype, settings)
    saved = results(pool.run(f"{JOBS}:save_planes", given[0], 3, *given[1:], ranks=3))
    for size in (1, 2, 4):
        for row in results(pool.run(f"{JOBS}:planes", given[0], size, *given[1:], ranks=size)):
            assert row["off"] == []
            if dtype == torch.float32:
                assert row["tokens"] == row["due"] == saved[0]
                assert row["error"] <= 1e-5


@pytest.mark.parametrize("what", ["merge", "table", "flat experts"])
def test_what_ranks_do_not_do_is_refused_on_all_of_them(pool: Pool, tmp_path: Path, what: str) -> None:
    for answer in pool.run(f"{JOBS}:refused", what, str(tmp_path), ranks=2):
        assert isinstance(answer, Failed) and answer.kind == "UnsupportedError", answer
        assert "2 ranks" in answer.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("settings", [{"replace_with_kernel_inject": True}, {}], ids=["fused", "own code"])
@pytest.mark.parametrize(
    ("name", "size"), [("llama", 3), ("gpt2", 2), ("bloom", 2), ("llama biases, tied", 4), ("phi3", 4)]
)
def test_adapters_are_cut_as_their_matrices_are(
    pool: Pool, name: str, size: int, settings: dict[str, Any]
) -> None:
    for more in ({}, {"quant": "int8"}):
        for row in results(pool.run(f"{JOBS}:adapted", named(name), size, {**settings, **more}, ranks=size)):
            assert row["error"] <= 1e-5 and row["same"] and row["moved"] > 0.1


def test_ranks_that_put_other_adapters_to_work_hear_of_it(pool: Pool) -> None:
    for answer in pool.run(f"{JOBS}:other_names", ranks=2):
        assert isinstance(answer, Failed) and answer.kind == "ConfigError", answer
        assert "give every rank the same names" in answer.message


@pytest.mark.parametrize(
    ("size", "settings", "device"),
    [(2, {"quant": "int8"}, "cpu"), (3, {}, "nvme"), (3, {"quant": "int4"}, "nvme")],
)
def test_layers_are_streamed_on_ranks_too(
    pool: Pool, tmp_path: Path, size: int, settings: dict[str, Any], device: str
) -> None:
    for row in results(pool.run(f"{JOBS}:offloaded", str(tmp_path), size, settings, device, ranks=size)):
        assert row["error"] <= 1e-5 and row["same"] and row["state"] == 0.0 and row["saved"]
        assert "are streamed from files" in row["text"]
