"""Finds tensors in mapped files, so that their pages need not become or stay resident.

A page of a mapping costs memory, and a fault, once it is touched. A pass over all values of a mapped model
that is not used yet should therefore read the files instead. After a tensor has been converted, its pages
should be dropped, since the mapping lives as long as any tensor of its file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["FileSpan", "MappedFiles"]

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) +(/.*)")
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
_SAMPLES = 4
_DONTNEED = 4  # MADV_DONTNEED of Linux


@dataclass(frozen=True)
class FileSpan:
    """A range of bytes of a file.

    Attributes:
        path: The file.
        begin: The first byte.
        end: One past the last byte.
    """

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class _Region:
    start: int
    end: int
    offset: int
    path: str


class MappedFiles:
    """The files that the process has mapped at the first query; none where the system does not report them.

    Source: https://docs.kernel.org/filesystems/proc.html, `/proc/PID/maps`, and
    https://docs.kernel.org/admin-guide/mm/pagemap.html.
    """

    @functools.cached_property
    def _regions(self) -> list[_Region]:
        with contextlib.suppress(OSError):
            return sorted(_regions(), key=lambda region: region.start)
        return []

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [region.start for region in self._regions]

    def absent(self, tensor: Tensor) -> FileSpan | None:
        """Return the file range of a tensor that is mapped but mostly not in memory.

        Args:
            tensor: A tensor on any device, with any strides.

        Returns:
            The range; None where the tensor is not mapped from a file that still exists, has been written to,
            or is mostly resident.
        """
        region = self._region(tensor)
        if region is None:
            return None
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        if not _is_untouched(begin, end):
            return None
        return FileSpan(region.path, begin - region.start + region.offset, end - region.start + region.offset)

    def holding(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the tensors that lie in mapped files, detached, to be given to `drop`."""
        return [tensor.detach() for tensor in tensors if self._region(tensor) is not None]

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Drop pages that will not be read soon; a later access reads the same values from the file again.

        Tensors that have been written to, and so differ from the file, keep their pages.

        Args:
            tensors: From `holding`. They keep their mappings alive.
        """
        page, advise = os.sysconf("SC_PAGE_SIZE"), _advise()
        for tensor in tensors:
            begin = -(-tensor.data_ptr() // page) * page  # whole pages only: neighbours may be in use
            end = (tensor.data_ptr() + tensor.nbytes) // page * page
            if advise is not None and begin < end and not _is_written(begin, end):
                advise(begin, end - begin, _DONTNEED)

    def _region(self, tensor: Tensor) -> _Region | None:
        """The mapping that contains the whole tensor, or None."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return None
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        index = bisect_right(self._starts, begin) - 1
        if index < 0 or end > self._regions[index].end or begin == end:
            return None
        return self._regions[index]


def _regions() -> Iterator[_Region]:
    identities: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        start, end, offset = (int(number, 16) for number in found.group(1, 2, 3))
        path = found.group(5)
        if path not in identities:
            identities[path] = os.stat(path).st_ino if os.path.exists(path) else -1
        if identities[path] == int(found.group(4)):  # the path may name another file by now
            yield _Region(start, end, offset, path)


def _is_untouched(begin: int, end: int) -> bool:
    """Whether no page of an address range has been written to and most of them are not in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = begin // page, (end - 1) // page
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            steps = range(first, last + 1, max(1, (last - first) // _SAMPLES))
            few = [int(entry) for step in steps for entry in _entries(table.fileno(), step, 1)]
            if sum(bool(entry & _PRESENT) for entry in few) * 2 > len(few):
                return False
            entries = _entries(table.fileno(), first, last - first + 1)
    except OSError:
        return False
    present = entries & np.uint64(_PRESENT) != 0
    return bool(len(entries) == last - first + 1 and not _any_written(entries) and present.mean() < 0.5)


def _is_written(begin: int, end: int) -> bool:
    """Whether a page of an address range differs, or may differ, from the file."""
    page = os.sysconf("SC_PAGE_SIZE")
    count = (end - begin) // page
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            entries = _entries(table.fileno(), begin // page, count)
    except OSError:
        return True
    return len(entries) < count or _any_written(entries)


def _any_written(entries: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> bool:
    present, swapped, of_file = (entries & np.uint64(flag) != 0 for flag in (_PRESENT, _SWAPPED, _OF_FILE))
    return bool((swapped | (present & ~of_file)).any())


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's `madvise`."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    advise = getattr(library, "madvise", None)
    if advise is not None:
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


def _entries(table: int, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.frombuffer(os.pread(table, count * 8, first * 8), np.uint64)
