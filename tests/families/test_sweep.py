"""Every variant of every registered family gives the original's answers in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import transformers

from slipstream.families import Family, Tiny
from tests.families.sweep import VARIANTS, Row, label, measure

TOLERANCE = 1e-4
"""The promise for logits in float32; hidden states are held to it relative to their largest value."""


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_family_answers_like_the_original(
    variant: tuple[Family, Tiny], record_property: Callable[[str, object], None]
) -> None:
    row = measure(*variant)
    record_property("family sweep", dict(zip(Row.titles(), row.cells(), strict=True)))
    errors = {
        "single": row.single,
        "left": row.left,
        "right": row.right,
        "cached": row.cached,
        "states": row.states,
    }
    assert row.level == "block"
    assert max(errors.values()) <= TOLERANCE, errors
    assert row.greedy in ("identical", "-")


def test_every_family_has_a_tiny_model() -> None:
    found = {family.name for family, _ in VARIANTS}
    # The oldest supported transformers lacks some types; the newest has them all.
    newest = transformers.__version__ >= "5.23"
    assert found == set(_registered()) if newest else found <= set(_registered())


def _registered() -> list[str]:
    from slipstream.families import FAMILIES

    return list(FAMILIES)
