"""Linears that only some inputs come to: ranks hold their share of them, too, and answer as one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.pool import Pool, results
from tests.parallel.test_families import INJECTED, SHARE, TOLERANCE

INT8 = {"quant": "int8"}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *(("led", size, settings) for size in (2, 4) for settings in (INJECTED, {})),
    ("led", 3, INJECTED),
    *(("led", 3, {**settings, **INT8}) for settings in (INJECTED, {})),
    *((name, size, {}) for name in ("longformer", "luke") for size in (2, 3)),
    ("longformer", 4, {**INJECTED, **INT8}),
    ("luke", 4, {**INJECTED, **INT8}),
]


@pytest.mark.parametrize(("name", "size", "settings"), CASES)
def test_linears_that_few_inputs_come_to_are_shared_and_right(
    pool: Pool, name: str, size: int, settings: dict[str, Any]
) -> None:
    rows = results(pool.run("tests.parallel.rare_jobs:rare", name, size, settings, ranks=size))
    assert max(rows[0]["errors"]) <= TOLERANCE
    assert all(row["errors"] == rows[0]["errors"] for row in rows), "ranks answer differently"
    assert all(row["greedy"] == ([True] * 3 if name == "led" else []) for row in rows)
    assert rows[0]["heard"] > 1e-2, "what is given beside tokens says nothing"
    assert not rows[0]["whole"]
    assert rows[0]["share"] is None or rows[0]["share"] <= SHARE


@pytest.mark.parametrize("name", ["longformer", "luke"])
def test_attention_with_linears_that_nothing_came_to_is_not_cut_by_heads(pool: Pool, name: str) -> None:
    row = results(pool.run("tests.parallel.rare_jobs:unheard_of", name, 2, ranks=2))[0]
    assert max(row["errors"]) <= TOLERANCE
    assert len(row["whole"]) == 6
    assert "no run reached" in row["text"]


@pytest.mark.parametrize("size", [2, 3])
def test_layers_that_change_with_a_prompts_length_are_shared_and_right(pool: Pool, size: int) -> None:
    row = results(pool.run("tests.parallel.rare_jobs:by_length", size, {}, ranks=size))[0]
    assert max(row["errors"]) <= TOLERANCE
    assert row["share"] <= SHARE
