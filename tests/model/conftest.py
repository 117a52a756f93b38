"""Which parts are swapped depends on the kernels that there are; these tests bring their own, or none."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for root in ("build", "settings"):
        monkeypatch.setattr(f"slipstream.engine.{root}.kernels_for", lambda device: ())
