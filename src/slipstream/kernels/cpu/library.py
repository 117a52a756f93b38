"""Finds, loads and calls the native library; where there is none, says why."""

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
"""Instruction sets that the library may be built for, best first."""

EMULATED = "amx-emulated"
"""The unit of AMX with tiles in plain C++, which tests run where the library has it; it is never chosen."""

_LIMIT = {"baseline": "baseline", "avx2": "avx2", "avx512": "avx512bf16", "amx": "amx"}
"""Best instruction set under each value of SLIPSTREAM_CPU_ISA."""

_FILE = "_native.so"
_CALLS = (
    "linear",
    "feed",
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
        index: Its number in the library.
        handle: The loaded file.
    """

    isa: str
    index: int
    handle: ctypes.CDLL

    def run(self, name: str, call: ctypes.Structure, threads: int | None = None) -> None:
        """Run `slipstream_<name>` on so many threads, or on as many as torch uses, `torch_alone` or not.

        Raises:
            DeviceError: The library refuses the arguments; nothing was read or written.
        """
        # As an attribute, for those are kept: an item is looked up in the file every time.
        function = getattr(self.handle, f"slipstream_{name}")
        status = function(self.index, threads or threads_of_torch(), byref(call))
        if status:
            message = self.handle.slipstream_error(status).decode()
            raise DeviceError(f"the native {name} of {self.isa} refuses its arguments: {message}")

    def rouse(self) -> None:
        """Announce a call: parked threads get up beside what is still to be done before it.

        An encoder of 6 layers takes 16 tokens in 0.487 ms so, and in 0.501 without.
        """
        if threads_of_torch() > 1:
            self.handle.slipstream_rouse()


@functools.cache
def _open(path: Path) -> ctypes.CDLL | str:
    """The loaded file, or why it cannot be used."""
    try:
        handle = ctypes.CDLL(str(path))
        number = handle.slipstream_abi()
        copy, finite, digest = (getattr(handle, f"slipstream_{name}") for name in _PASSES)
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded ({error}); build it again on this machine"
    if number != ABI:
        return f"{path.name} is of version {number}, this package needs {ABI}; install it again"
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
    # An editable install keeps what it built apart from the sources.
    spec = importlib.util.find_spec(f"{__package__}.{_FILE.removesuffix('.so')}")
    if spec is None or spec.origin is None:
        return (
            "the native library was not built; install the package where there is a C++ compiler "
            "(`pip install -v` prints what one refuses)"
        )
    return _open(Path(spec.origin))


def load(isa: str | None = None) -> Library | None:
    """Return the library for an instruction set, or for the best one that this machine has and may use.

    Args:
        isa: One of `ISAS`, or `EMULATED`; None for the best under `SLIPSTREAM_CPU_ISA`.

    Returns:
        None where `refuse` has the reason.
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
    """Why kernels of an instruction set should not be chosen, or None where they should.

    Raises:
        ConfigError: `SLIPSTREAM_CPU_ISA` is none of the known names.
    """
    limit = cpu_isa()
    if limit == "reference":
        return "SLIPSTREAM_CPU_ISA=reference asks for no kernel"
    handle = _find()
    if isinstance(handle, str):
        return handle
    unit = "amx" if isa == EMULATED else isa
    if limit is not None and ISAS.index(unit) < ISAS.index(_LIMIT[limit]):
        return f"SLIPSTREAM_CPU_ISA={limit} asks for less"
    if isa == "baseline" and limit != "baseline":
        return "torch's own kernels are faster; SLIPSTREAM_CPU_ISA=baseline asks for it"
    return None if _load(isa) is not None else "the processor or the library has no such instructions"


LONG = 8e7
"""Additions and multiplications from which on a product waits for torch's threads to end. They spin for
milliseconds after torch's own operations: 512 rows times 2048 x 2048 take 11.2 ms beside them and 5.5
without, and the next operation 0.1 ms longer; 256 rows through 4 layers of 576 that else run their own code
take 52 ms and 43."""


def rest_torch() -> None:
    """End the idle threads of torch's OpenMP pool; its next parallel operation starts new ones.

    They spin for milliseconds after such an operation and keep the library's own threads from the processors:
    on two cores a decode step of a 135-million model takes 17.8 ms beside them, and 10.5 ms without.

    Source: OpenMP 5.0, section 3.2.43, `omp_pause_resource_all`.
    """
    if (openmp := _openmp()) is not None:
        openmp.omp_pause_resource_all(_PAUSE_SOFT)


_PAUSE_SOFT = 1
_kept = threading.local()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Within, torch's operations run on this thread alone, and the library on as many as before.

    A norm of 16 rows starts a thread of OpenMP's for a few microseconds of work, and `rest_torch` ends it
    again: together with a pooler's product that was 0.9 of the 2.4 ms of a 6-layer encoder of 384 channels.
    Other threads of the process are not concerned.

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
    """How many threads torch uses, `torch_alone` or not."""
    return getattr(_kept, "threads", 0) or torch.get_num_threads()


def _openmp_in(maps: str) -> str | None:
    """The OpenMP runtime among the files that a process has mapped: torch's own, if it brought one."""
    # A line has five fields before its path, which may have spaces.
    paths = {fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    runtimes = [path for path in sorted(paths) if re.match(r"lib(gomp|iomp5|omp)[-.]", Path(path).name)]
    own = Path(torch.__file__).parent
    return min(runtimes, key=lambda path: not Path(path).is_relative_to(own), default=None)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, or None where there is none that can pause."""
    try:
        path = _openmp_in(Path("/proc/self/maps").read_text())
        library = None if path is None else ctypes.CDLL(path)
    except OSError:  # no such table, or the file is there no more
        return None
    if library is None or not hasattr(library, "omp_pause_resource_all"):
        return None
    # A child of fork waits forever for idle threads that only its parent has.
    os.register_at_fork(before=lambda: library.omp_pause_resource_all(_PAUSE_SOFT))
    return library
