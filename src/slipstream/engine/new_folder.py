"""Creates folders atomically: complete, or not at all."""

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
    """Return the absolute path of a folder to be created, with links resolved.

    Args:
        folder: Must not exist, or be an empty folder.
        what: The name for the folder in errors; its path if None.

    Raises:
        ConfigError: The folder is not empty, its parent is not a folder that can be written to, or it is the
            current working directory, which would be replaced.
    """
    what = what or str(folder)
    try:
        folder = folder.expanduser()
        place = folder.resolve()
        taken = os.path.lexists(place) and (not place.is_dir() or any(place.iterdir()))
        dangling = folder.is_symlink() and not place.exists()
        is_current = place == Path.cwd()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a NUL in it, circular links
        raise ConfigError(f"{what} is not a valid path ({error}); name another folder") from error
    if taken or dangling:
        raise _exists(what)
    if is_current:
        raise ConfigError(f"{what} is the working directory of this process; name a folder to create")
    above = next(path for path in place.parents if os.path.lexists(path))
    trial = above / f".{place.name[:64]}.{uuid.uuid4().hex[:8]}"
    try:  # permissions are not enough to know: a file system may be read-only
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        why = f"{above} is not a writable folder ({error.strerror})"
        raise ConfigError(f"{what} cannot be created: {why}; name another folder") from error
    return place


@contextmanager
def made_at_once(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which is renamed to `folder` at the end.

    Raises:
        ConfigError: As for `free_place`, or another process created the folder meanwhile.
        OSError: The folder cannot be written.
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
