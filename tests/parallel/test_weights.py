"""Weights of engines on several ranks: streamed from files into empty models, by every rank its own part."""

from __future__ import annotations

import sys
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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak cannot be reset")
@pytest.mark.parametrize("settings", [INJECTED, OWN_CODE], ids=["injected", "own code"])
def test_memory_grows_by_a_rank_s_part_and_little_more(
    pool: Pool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for row in results(pool.run(f"{JOBS}:grown", 2, settings, str(tmp_path), ranks=2)):
        assert row["own"] < 110  # of 210
        # A layer as it is stored, the same as it is made, its pages of the file, and some for the process.
        assert row["peak"] < row["own"] + 4 * row["layer"]


@pytest.mark.parametrize("settings", [INJECTED, OWN_CODE], ids=["injected", "own code"])
@pytest.mark.parametrize(
    ("what", "words"),
    [("cut short", "is cut short"), ("lacking", "it lacks model.layers.1"), ("NaN", "holds NaN")],
)
def test_a_copy_that_is_bad_on_one_rank_is_an_error_on_all(
    pool: Pool, tmp_path: Path, what: str, words: str, settings: dict[str, Any]
) -> None:
    rows = results(pool.run(f"{JOBS}:damaged", 3, what, settings, str(tmp_path), ranks=3))
    for rank, row in enumerate(rows):
        assert row["said"].startswith("WeightError: " + ("rank 2: " if rank < 2 else ""))
        assert words in row["said"]
        assert row["empty"]


@pytest.mark.parametrize("settings", [INJECTED, OWN_CODE], ids=["injected", "own code"])
def test_a_copy_with_other_values_on_one_rank_is_an_error_on_all(
    pool: Pool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for row in results(pool.run(f"{JOBS}:damaged", 3, "other", settings, str(tmp_path), ranks=3)):
        assert row["said"].startswith("ConfigError: the ranks that share a model disagree on the weight")
        assert "model.layers.1.mlp.down_proj.weight of the checkpoint" in row["said"]
        assert row["empty"]


WRITTEN: list[tuple[str, dict[str, Any], int]] = [
    ("llama", INJECTED, 3),  # a kv head on two ranks
    ("bloom", {**INJECTED, "quant": "int8"}, 2),  # rows by heads, multipliers of whole rows
    ("gpt_oss", INJECTED, 2),  # sinks, experts with biases
    ("falcon_h1", INJECTED, 3),  # layers that run their own code
    ("gpt2", OWN_CODE, 2),  # Conv1D, a tied head
    ("bloom", OWN_CODE, 2),  # biases that the first rank adds
    ("t5", {"quant": "int8"}, 2),
    ("mixtral", {"quant": "int4"}, 2),
]


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [case for case in WRITTEN if case[0] in map(label, VARIANTS)],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_ranks_take_their_parts_of_new_weights(
    pool: Pool, name: str, settings: dict[str, Any], size: int
) -> None:
    for row in results(pool.run(f"{JOBS}:refreshed", named(name), size, settings, ranks=size)):
        assert row == {"error": 0.0, "same": True, "state": True}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("llama", {**INJECTED, "quant": "int8"}), ("mixtral", OWN_CODE), ("gpt2", INJECTED)],
)
def test_ranks_load_a_checkpoint_that_ranks_saved(
    pool: Pool, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    job = (f"{JOBS}:reloaded", named(name), 2, settings, str(tmp_path))
    for row in results(pool.run(*job, ranks=2)):
        assert row == {"error": 0.0, "same": True}


TIED: dict[str, tuple[dict[str, Any], bool]] = {  # and whether the head and the table are one in the engine
    "plain": ({}, True),
    "a packed head": ({"quant": "int8"}, False),
    "one set of planes": ({"quant": {"weight": {"format": "int8"}, "embedding": "int8"}}, True),
}


@pytest.mark.parametrize("road", [INJECTED, OWN_CODE], ids=["injected", "own code"])
@pytest.mark.parametrize("differ", [False, True], ids=["the same values", "other values"])
@pytest.mark.parametrize(("settings", "one"), TIED.values(), ids=TIED)
def test_ranks_load_a_head_beside_a_tied_table(
    pool: Pool, tmp_path: Path, settings: dict[str, Any], one: bool, differ: bool, road: dict[str, Any]
) -> None:
    job = (f"{JOBS}:reloaded_ties", 2, {**settings, **road}, differ, str(tmp_path))
    for row in results(pool.run(*job, ranks=2)):
        assert ("are one tensor in this engine" in row["said"]) == (one and differ), row
        assert row["state"]


@pytest.mark.parametrize(
    ("what", "kind", "match"),
    [
        ("values", "WeightError", "disagree on the values of"),
        ("name", "WeightError", "lacks"),
        ("nan", "WeightError", "NaN"),
        ("file", "WeightError", "nowhere"),
        ("shape", "WeightError", "has shape"),
    ],
)
@pytest.mark.parametrize("settings", [INJECTED, OWN_CODE], ids=["injected", "own code"])
def test_what_one_rank_cannot_write_none_of_them_writes(
    pool: Pool, tmp_path: Path, what: str, kind: str, match: str, settings: dict[str, Any]
) -> None:
    for row in results(pool.run(f"{JOBS}:refused", 2, what, settings, str(tmp_path), ranks=2)):
        assert row["kind"] == kind and match in row["message"], row
        assert row["as it was"]
