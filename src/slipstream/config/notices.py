"""Warnings that are given once per process, attributed to the caller's line, not to the library's."""

from __future__ import annotations

import functools
import sys
import warnings

__all__ = ["warn_once"]

_OURS = ("slipstream", "pydantic")


@functools.cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn unless the same warning was given before; `warn_once.cache_clear()` resets that.

    A warning that a filter turns into an exception does not count as given: it is raised every time.
    """
    warnings.warn(message, category, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """Count the frames from `warn_once` up to the first one outside the library."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, levels = frame.f_back, levels + 1
    return levels
