"""Setup of all tests: one thread, so that runs are comparable; one seed; and the tables of the sweeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table for each title for which tests called `record_property(title, {column: cell})`."""
    tables: dict[str, list[dict[str, str]]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for title, row in getattr(report, "user_properties", ()):
                if isinstance(row, dict):
                    tables.setdefault(title, []).append(row)
    for title, rows in tables.items():
        terminalreporter.write_sep("-", f"{title}: {len(rows)} rows")
        lines = [list(rows[0]), *sorted(list(row.values()) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        for line in lines:
            terminalreporter.write_line(
                "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            )


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, independent of what ran before in its worker."""
    torch.manual_seed(0)
