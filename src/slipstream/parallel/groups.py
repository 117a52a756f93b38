"""Process groups that this package makes: engines share them, and they end before the interpreter does.

A thread of gloo lets go of a collective's tensors after it has said that the collective is done, and takes
the interpreter's lock to do so. Where the interpreter has begun to end by then, Python ends the thread in the
middle of a destructor, and C++ ends the process: SIGABRT, "terminate called without an active exception",
after the last answer. A group that is destroyed waits for its threads, unless somebody still holds it: so
whoever uses a group here has a weak reference, and torch's own table the strong one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slipstream.errors import DeviceError

__all__ = ["alive", "begin", "end", "given", "made", "using"]

_Parts = tuple[tuple[int, ...], ...]
_Key = tuple[_Parts, str, timedelta]

_MADE: weakref.WeakKeyDictionary[Any, dict[_Key, weakref.ReferenceType[Any]]] = weakref.WeakKeyDictionary()
"""Groups by the world that they are of."""

_BEGAN: weakref.WeakSet[Any] = weakref.WeakSet()
"""Worlds that began here, and not in the user's script."""

_GIVEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""The user's own groups with gloo in them, which are the user's to destroy."""

_MOMENT = 0.1
"""Seconds that the threads of the user's groups have for letting go of a tensor, which takes microseconds."""

_IN_USE: dict[object, tuple[Any, ...]] = {}
"""Groups in which a collective is under way, or failed: their threads may be waiting yet."""

_PROCESS = os.getpid()


def begin(backend: str, **settings: Any) -> None:
    """Begin torch.distributed, as `init_process_group` does, and end it with the interpreter.

    Raises:
        RuntimeError: The ranks did not meet.
        ValueError: An address or a backend that torch does not know.
    """
    dist.init_process_group(backend, **settings)
    _BEGAN.add(dist.group.WORLD)


def made(parts: _Parts, backend: str, timeout: timedelta, *, by_all: bool = True) -> Any:
    """This process's group of several; engines of one world share it, for each holds sockets and threads.

    Args:
        parts: The ranks of each group.
        backend: Of torch.distributed.
        timeout: How long a collective of it may take.
        by_all: All processes of the world are here; otherwise those of the one group.
    """
    of_world = _MADE.setdefault(dist.group.WORLD, {})
    key = (parts, backend, timeout)
    found = of_world[key]() if key in of_world else None
    if found is None:
        new = [dist.new_group(list(ranks), timeout, backend, None, not by_all) for ranks in parts]
        found = next(group for group, ranks in zip(new, parts, strict=True) if dist.get_rank() in ranks)
        of_world[key] = weakref.ref(found)
    return found


def given(group: Any) -> weakref.ReferenceType[Any]:
    """A group that the user made, as an axis holds it."""
    if "gloo" in dist.get_backend_config(group):
        _GIVEN.add(group)
    return weakref.ref(group)


def alive(group: weakref.ReferenceType[Any] | None) -> Any:
    """The group, or None where there is one rank.

    Raises:
        DeviceError: It was destroyed; without it, torch would take the whole world.
    """
    found = None if group is None else group()
    if group is not None and found is None:
        raise DeviceError(
            "the process group of the ranks that share this model was destroyed "
            "(torch.distributed.destroy_process_group); build the engine again, or call it before that"
        )
    return found


@contextlib.contextmanager
def using(*groups: Any) -> Iterator[None]:
    """Within, a collective of some groups is under way; one that fails leaves them in use for good.

    Its thread may wait minutes for a rank that hangs, and whoever destroyed the group would wait with it.
    """
    call = object()
    _IN_USE[call] = groups
    try:
        yield
    except BaseException:
        for group in groups:
            # Not even the end of the interpreter is to free it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        raise
    del _IN_USE[call]


@atexit.register
def end() -> None:
    """Destroy what was made and begun here, and so wait for its threads; the user's groups have a moment.

    Left as they are: the user's world, groups of the process that this one is a fork of, and NCCL's, for to
    end one is a meeting of all ranks, and some may be gone.
    """
    if os.getpid() != _PROCESS:
        return
    if _GIVEN:
        time.sleep(_MOMENT)
    if not dist.is_available() or not dist.is_initialized():
        return
    world = dist.group.WORLD
    if world in _BEGAN and not _IN_USE and "nccl" not in dist.get_backend_config(world):
        dist.destroy_process_group()
        return
    in_use = [group for groups in _IN_USE.values() for group in groups]
    for (_, backend, _), reference in _MADE.pop(world, {}).items():
        group = reference()
        if group is not None and backend == "gloo" and not any(group is one for one in in_use):
            with contextlib.suppress(ValueError):  # the user's script has destroyed it, and holds it
                dist.destroy_process_group(group)
