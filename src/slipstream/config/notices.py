"""Warnings that are given once per process, and point at the caller's line rather than at ours."""

from __future__ import annotations

import functools
import sys
import warnings

__all__ = ["warn_once"]

_OURS = ("slipstream", "pydantic")


@functools.cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with this message the first time it is given; `warn_once.cache_clear()` forgets all of them.

    A warning that a filter turns into an exception is not counted as given: it is raised every time.
    """
    warnings.warn(message, category, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """Count the frames from `warn_once` up to the first that is not inside the library."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, levels = frame.f_back, levels + 1
    return levels
