"""The reference page is what the declarations and the table of effects say."""

from __future__ import annotations

from pathlib import Path

from slipstream.config.document import fields, render
from slipstream.config.effects import EFFECTS
from slipstream.config.environment import VARIABLES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == render(), "docs/config.md is stale; generate it again"


def test_the_page_has_every_field_effect_and_variable() -> None:
    page = render()
    for name in fields():
        assert f"| `{name.rpartition('.')[2]}` |" in page
        assert EFFECTS[name].sentence in page
    for name in VARIABLES:
        assert f"| `{name}` |" in page


def test_every_row_has_as_many_cells_as_its_header() -> None:
    for table in render().split("\n\n"):
        rows = [line.replace("\\|", "") for line in table.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, table
