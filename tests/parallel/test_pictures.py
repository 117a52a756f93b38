"""A language model that looks at pictures between its layers, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.pool import Pool, results
from tests.parallel.test_families import INJECTED

OWN_CODE: dict[str, Any] = {}
TOLERANCE = 1e-5
"""Of logits, over the largest: reductions add up in another order."""


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cross_layer_interval": 2, "qk_layer_norms": True, "alpha_type": "vector"},
        {"use_resampler": True},
    ],
    ids=["every layer", "every second, heads normalised", "resampled"],
)
@pytest.mark.parametrize(
    ("size", "settings", "level", "share"),
    [
        (2, INJECTED, "block", 0.6),  # patches, positions and gates are on every rank
        (3, INJECTED, "block", 0.46),
        (2, OWN_CODE, "none", 0.6),
        (3, OWN_CODE, "none", 0.46),
        (2, {**INJECTED, "quant": "int8"}, "block", 0.3),
        (3, {"quant": "int8"}, "none", 0.25),
    ],
)
def test_ranks_look_at_pictures_as_one_process_does(
    pool: Pool, size: int, settings: dict[str, Any], level: str, share: float, more: dict[str, Any]
) -> None:
    job = pool.run("tests.parallel.picture_jobs:idefics", size, more, settings, ranks=size)
    for row in results(job):
        assert row["error"] <= TOLERANCE
        assert row["greedy"] and row["beams"]
        *fused, looking = row["levels"]
        assert all(levels == {level} for levels in fused)
        assert looking == {"none" if level == "none" else "module"}  # a course of its own is not split
        assert row["share"] < share
