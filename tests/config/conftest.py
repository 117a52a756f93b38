"""What the tests of the configuration share: warnings start afresh, and no variable leaks in from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.config.environment import VARIABLES
from slipstream.config.notices import warn_once


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()
