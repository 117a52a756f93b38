"""Process groups that this package creates: engines share them, and they are destroyed at interpreter exit.

A thread of gloo releases a collective's tensors after it has reported that the collective is done, and takes
the interpreter's lock to do so. If the interpreter is shutting down by then, Python ends the thread in the
middle of a destructor, and C++ aborts the process: SIGABRT, "terminate called without an active exception",
after all results were returned. Destroying a group waits for its threads, but only if nothing else references
it: users of a group therefore hold weak references, and torch's own table holds the only strong one.
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
"""Groups created here, by their world."""

_BEGAN: weakref.WeakSet[Any] = weakref.WeakSet()
"""Worlds that were initialized here, not in the user's script."""

_GIVEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""The user's own groups with a gloo backend; the user has to destroy them."""

_MOMENT = 0.1
"""Seconds given to threads of the user's groups to release their tensors, which takes microseconds."""

_IN_USE: dict[object, tuple[Any, ...]] = {}
"""Groups in which a collective is running or has failed: their threads may still be waiting."""

_PROCESS = os.getpid()


def begin(backend: str, **settings: Any) -> None:
    """Initialize torch.distributed by `init_process_group`; it is destroyed at interpreter exit.

    Raises:
        RuntimeError: The ranks did not connect.
        ValueError: Torch does not know the address or the backend.
    """
    dist.init_process_group(backend, **settings)
    _BEGAN.add(dist.group.WORLD)


def made(parts: _Parts, backend: str, timeout: timedelta, *, by_all: bool = True) -> Any:
    """Return the group of `parts` that this process is in, creating all of them on first use.

    Engines of one world share groups, since each holds sockets and threads.

    Args:
        parts: The ranks of each group.
        backend: A backend of torch.distributed.
        timeout: Timeout of the group's collectives.
        by_all: Whether all processes of the world make this call; if not, only those of the one group do.
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
    """Return a weak reference to the user's own group, as an `Axis` holds it."""
    if "gloo" in dist.get_backend_config(group):
        _GIVEN.add(group)
    return weakref.ref(group)


def alive(group: weakref.ReferenceType[Any] | None) -> Any:
    """Return the referenced group, or None where there is one rank.

    Raises:
        DeviceError: The group was destroyed; given None instead, torch would use the whole world.
    """
    found = None if group is None else group()
    if group is not None and found is None:
        raise DeviceError(
            "the process group of the ranks that share this model was destroyed "
            "(torch.distributed.destroy_process_group); build the engine again, or use it before that"
        )
    return found


@contextlib.contextmanager
def using(*groups: Any) -> Iterator[None]:
    """Context of a running collective of some groups; if it fails, they stay marked as in use for good.

    The thread of a failed collective may wait minutes for a rank that hangs, and destroying the group would
    wait for the thread.
    """
    call = object()
    _IN_USE[call] = groups
    try:
        yield
    except BaseException:
        for group in groups:
            # Never free the group, not even at interpreter exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        raise
    del _IN_USE[call]


@atexit.register
def end() -> None:
    """Destroy groups created here, which waits for their threads; the user's groups get a short sleep.

    Not destroyed are the user's world, groups of the parent of a forked process, and NCCL groups: destroying
    one of those needs all ranks, some of which may be gone.
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
            with contextlib.suppress(ValueError):  # destroyed by the user's script, which still references it
                dist.destroy_process_group(group)
