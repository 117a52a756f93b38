"""Finds, loads and calls the native library, or gives the reason why it cannot be used."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.config.environment import cpu_isa
from slipstream.errors import DeviceError
from slipstream.kernels.cpu.abi import ABI

__all__ = [
    "EMULATED",
    "ISAS",
    "LONG",
    "Library",
    "load",
    "refuse",
    "rest_torch",
    "threads_of_torch",
    "torch_alone",
]

ISAS = ("amx", "avx512bf16", "avx512", "avx2", "baseline")
"""Instruction sets that the library can be built for, best first."""

EMULATED = "amx-emulated"
"""The AMX unit with tiles emulated in C++, for tests, if the library has it; never chosen by default."""

_LIMIT = {"baseline": "baseline", "avx2": "avx2", "avx512": "avx512bf16", "amx": "amx"}
"""Best instruction set that each value of SLIPSTREAM_CPU_ISA allows."""

_FILE = "_native.so"
_CALLS = (
    "linear",
    "feed",
    "experts",
    "draw",
    "norm",
    "attention",
    "paged_attention",
    "stack",
    "text",
    "model",
    "pack",
    "sketch",
)
_PASSES = ("copy", "finite", "digest")


@dataclass(frozen=True)
class Library:
    """The native library, called for one instruction set.

    Attributes:
        isa: One of `ISAS`, or `EMULATED`.
        index: The library's index of that instruction set.
        handle: The loaded file.
    """

    isa: str
    index: int
    handle: ctypes.CDLL

    def run(self, name: str, call: ctypes.Structure, threads: int | None = None) -> None:
        """Run `slipstream_<name>` on `threads` threads, by default `threads_of_torch()`.

        Raises:
            DeviceError: The library refuses the arguments; nothing was read or written.
        """
        # ctypes caches attributes, whereas indexing would look the symbol up in the file every time.
        function = getattr(self.handle, f"slipstream_{name}")
        status = function(self.index, threads or threads_of_torch(), byref(call))
        if status:
            message = self.handle.slipstream_error(status).decode()
            raise DeviceError(f"the native {name} of {self.isa} refuses its arguments: {message}")

    def rouse(self) -> None:
        """Announce an upcoming call: parked threads wake up while the caller still prepares it.

        An encoder of 6 layers takes 0.487 ms for 16 tokens with this, and 0.501 ms without.
        """
        if threads_of_torch() > 1:
            self.handle.slipstream_rouse()


@functools.cache
def _open(path: Path) -> ctypes.CDLL | str:
    """Return the loaded file, or the reason why it cannot be used."""
    try:
        handle = ctypes.CDLL(str(path))
        number = handle.slipstream_abi()
        copy, finite, digest = (getattr(handle, f"slipstream_{name}") for name in _PASSES)
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded ({error}); build it again on this machine"
    if number != ABI:
        return f"{path.name} has version {number}, but this package needs {ABI}; install the package again"
    handle.slipstream_error.restype = c_char_p
    handle.slipstream_rouse.restype = None
    for name in _CALLS:
        getattr(handle, f"slipstream_{name}").argtypes = [c_int32, c_int32, c_void_p]
    copy.argtypes = [c_int32, c_void_p, c_void_p, c_int64]
    finite.argtypes = [c_int32, c_void_p, c_int64, c_int32, c_void_p]
    digest.argtypes = [c_int32, c_void_p, c_int64, c_void_p]
    return handle


def _find() -> ctypes.CDLL | str:
    beside = Path(__file__).with_name(_FILE)
    if beside.exists():
        return _open(beside)
    # An editable install keeps build products apart from the sources.
    spec = importlib.util.find_spec(f"{__package__}.{_FILE.removesuffix('.so')}")
    if spec is None or spec.origin is None:
        return (
            "the native library was not built; install the package on a machine with a C++ compiler "
            "(`pip install -v` prints its errors)"
        )
    return _open(Path(spec.origin))


def load(isa: str | None = None) -> Library | None:
    """Return the library for an instruction set, by default the best one that is available and allowed.

    Args:
        isa: One of `ISAS`, or `EMULATED`; None for the best that `SLIPSTREAM_CPU_ISA` allows.

    Returns:
        The library; None if it is not available, in which case `refuse` returns the reason.
    """
    if isa is None:
        return next((_load(name) for name in ISAS if refuse(name) is None), None)
    return _load(isa)


@functools.cache
def _load(isa: str) -> Library | None:
    handle = _find()
    if isinstance(handle, str):
        return None
    index = handle.slipstream_isa(isa.encode())
    return Library(isa, index, handle) if index >= 0 else None


def refuse(isa: str) -> str | None:
    """Return why kernels of an instruction set should not be chosen, or None if they may be.

    Raises:
        ConfigError: `SLIPSTREAM_CPU_ISA` is not a known name.
    """
    limit = cpu_isa()
    if limit == "reference":
        return "SLIPSTREAM_CPU_ISA=reference disables the kernels"
    handle = _find()
    if isinstance(handle, str):
        return handle
    unit = "amx" if isa == EMULATED else isa
    if limit is not None and ISAS.index(unit) < ISAS.index(_LIMIT[limit]):
        return f"SLIPSTREAM_CPU_ISA={limit} disables it"
    if isa == "baseline" and limit != "baseline":
        return "torch's own kernels are faster; SLIPSTREAM_CPU_ISA=baseline enables it"
    return None if _load(isa) is not None else "the processor or the library lacks these instructions"


LONG = 8e7
"""Additions and multiplications from which a product ends torch's idle threads first (`rest_torch`). They
spin for milliseconds after torch's own operations: 512 rows times 2048 x 2048 take 11.2 ms while they spin
and 5.5 ms otherwise, but then the next torch operation takes 0.1 ms longer; 256 rows through 4 layers of
width 576 that run their own code apart from products take 52 ms and 43 ms."""


def rest_torch() -> None:
    """End the idle threads of torch's OpenMP pool; its next parallel operation starts new ones.

    The idle threads spin for milliseconds after an operation and compete with the library's threads for the
    cores: on two cores a decode step of a 135-million model takes 17.8 ms while they spin, and 10.5 ms
    otherwise.

    Source: OpenMP 5.0, section 3.2.43, `omp_pause_resource_all`.
    """
    if _may_end.is_set() and (openmp := _openmp()) is not None:
        with _ending:
            openmp.omp_pause_resource_all(_PAUSE_SOFT)


_PAUSE_SOFT = 1
_ending = threading.RLock()
"""Held while threads end, and during a fork: a thread that ends holds a lock of MKL, which a child would
inherit."""

_may_end = threading.Event()
_may_end.set()
"""Cleared in a child that was forked while other threads ran: these may have held that lock for another
reason, and a thread that ends in the child would wait for it forever."""

_kept = threading.local()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Run torch's operations on the calling thread alone; the library uses as many threads as before.

    A norm of 16 rows would start an OpenMP thread for a few microseconds of work, and `rest_torch` would end
    it again: together with a pooler's product that took 0.9 of the 2.4 ms of a 6-layer encoder of 384
    channels. Other threads of the process are not affected.

    Source: OpenMP 5.0, section 3.2.1, `omp_set_num_threads`: it sets a value of the calling thread's task.
    """
    openmp = _openmp()
    if openmp is None or hasattr(_kept, "threads"):
        yield
        return
    _kept.threads = torch.get_num_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(_kept.threads)
        del _kept.threads


def threads_of_torch() -> int:
    """Return how many threads torch uses outside of `torch_alone`, also when called within it."""
    return getattr(_kept, "threads", 0) or torch.get_num_threads()


def _openmp_in(maps: str) -> str | None:
    """Return the path of the OpenMP runtime in `/proc/self/maps`, preferably the one shipped with torch."""
    # Each line has five fields before the path, and the path may contain spaces.
    paths = {fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    runtimes = [path for path in sorted(paths) if re.match(r"lib(gomp|iomp5|omp)[-.]", Path(path).name)]
    own = Path(torch.__file__).parent
    return min(runtimes, key=lambda path: not Path(path).is_relative_to(own), default=None)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch has loaded, or None if there is none that can be paused."""
    try:
        path = _openmp_in(Path("/proc/self/maps").read_text())
        library = None if path is None else ctypes.CDLL(path)
    except OSError:  # there is no such table, or the file no longer exists
        return None
    if library is None or not hasattr(library, "omp_pause_resource_all"):
        return None
    are_others = False

    def begin_fork() -> None:
        nonlocal are_others
        _ending.acquire()
        are_others = threading.active_count() > 1
        # The child would wait forever for idle threads that exist only in its parent.
        library.omp_pause_resource_all(_PAUSE_SOFT)

    def begin_child() -> None:
        _ending.release()
        if are_others:
            _may_end.clear()

    os.register_at_fork(before=begin_fork, after_in_parent=_ending.release, after_in_child=begin_child)
    return library
