"""Folders that are made at once and complete, or not at all: where one may be, and how it appears."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import ConfigError

__all__ = ["free_place", "made_at_once"]

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def free_place(folder: Path, what: str | None = None) -> Path:
    """Where a folder is to be made: absolute, through links.

    Args:
        folder: Must not exist, or be an empty folder.
        what: Names it in errors; without it the folder's own name.

    Raises:
        ConfigError: Something is there, it lies in what is no folder or may not be written to, or it is the
            folder that this process works in, which would be another one then.
    """
    what = what or str(folder)
    try:
        folder = folder.expanduser()
        place = folder.resolve()
        taken = os.path.lexists(place) and (not place.is_dir() or any(place.iterdir()))
        dangling = folder.is_symlink() and not place.exists()
        is_current = place == Path.cwd()
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a NUL in it, links in a circle
        raise ConfigError(f"{what} names no place ({error}); name another folder") from error
    if taken or dangling:
        raise _exists(what)
    if is_current:
        raise ConfigError(f"{what} is the folder that this process works in; name one that is to be made")
    above = next(path for path in place.parents if os.path.lexists(path))
    trial = above / f".{place.name[:64]}.{uuid.uuid4().hex[:8]}"
    try:  # what is allowed does not say what can be done: there are file systems that nobody can write to
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        said = f"{above} is no folder that may be written to ({error.strerror})"
        raise ConfigError(f"{what} cannot be made: {said}; name another") from error
    return place


@contextmanager
def made_at_once(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `folder` once it is full.

    Raises:
        ConfigError: As `free_place`; or another process was first.
        OSError: It cannot be written.
    """
    place = free_place(folder)
    partial = place.parent / f".{place.name}.{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        yield partial
        try:
            if place.exists():
                place.rmdir()
            os.replace(partial, place)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            raise _exists(str(folder)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _exists(what: str) -> ConfigError:
    return ConfigError(f"{what} exists already; remove it or name another folder")
