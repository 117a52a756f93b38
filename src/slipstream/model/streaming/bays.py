"""Storage of streamed layers, and the few buffers ("bays") into which they are loaded, one layer in each.

On the CPU under Linux, a bay is a range of addresses into which the files' own pages are mapped: nothing is
copied, and pages in the system's cache need no reading. Elsewhere a layer is read from files, or copied from
host memory, into the bay.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.devices import Device, Lane
from slipstream.errors import DeviceError, WeightError

__all__ = ["Bay", "Extent", "Spill", "Stored", "in_host_memory", "lay_out", "open_bays"]

_PAGE = mmap.ALLOCATIONGRANULARITY
_GAP = 1 << 16
"""Largest gap between two tensors that is read along with them rather than starting a new range."""
_ALIGNMENT = 64
_POPULATE = 0x8000  # Linux's MAP_POPULATE, which Python's mmap does not define
_FIXED = 0x10


@dataclass(frozen=True)
class Extent:
    """A tensor's bytes in a file.

    Attributes:
        file: File descriptor.
        begin: First byte.
        size: Number of bytes.
    """

    file: int
    begin: int
    size: int


@dataclass(frozen=True)
class Stored:
    """A stored layer: ranges of pages in files, and where each begins in a bay; or a copy in host memory.

    Attributes:
        ranges: Extents that begin at page boundaries.
        places: The first byte of each range in the bay.
        size: Bytes that the layer takes in a bay.
        offsets: The first byte of each tensor in the bay.
        host: `(size,)` bytes of host memory instead of files, laid out as in the bay.
    """

    ranges: tuple[Extent, ...]
    places: tuple[int, ...]
    size: int
    offsets: tuple[int, ...]
    host: Tensor | None = None


def lay_out(extents: Sequence[Extent]) -> Stored:
    """Join extents that are close together in files into ranges from page boundaries, and lay those out."""
    order = sorted(range(len(extents)), key=lambda i: (extents[i].file, extents[i].begin))
    ranges: list[list[int]] = []
    member: dict[int, int] = {}
    for index in order:
        extent = extents[index]
        end = extent.begin + extent.size
        if not ranges or ranges[-1][0] != extent.file or extent.begin > ranges[-1][2] + _GAP:
            ranges.append([extent.file, extent.begin // _PAGE * _PAGE, end])
        ranges[-1][2] = max(ranges[-1][2], end)
        member[index] = len(ranges) - 1
    places, size = [], 0
    for _, begin, end in ranges:
        places.append(size)
        size += -(-(end - begin) // _PAGE) * _PAGE
    offsets = tuple(places[member[i]] + extents[i].begin - ranges[member[i]][1] for i in range(len(extents)))
    joined = tuple(Extent(file, begin, end - begin) for file, begin, end in ranges)
    return Stored(joined, tuple(places), size, offsets)


def in_host_memory(tensors: Sequence[Tensor], *, pinned: bool) -> Stored:
    """Copy contiguous tensors side by side into host memory, page-locked if `pinned`."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and torch.cuda.is_available(), device="cpu")
    for tensor, begin in zip(tensors, offsets, strict=True):
        host[begin : begin + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
    return Stored((), (), size, tuple(offsets), host)


class Spill:
    """An unnamed temporary file for tensors that no file has in the needed form; it ends with the process.

    Attributes:
        size: Number of bytes written.
    """

    def __init__(self, folder: Path | None) -> None:
        """Create the file in a folder, or where the system keeps temporary files.

        Raises:
            WeightError: It cannot be created there.
        """
        self.size = 0
        self._folder = tempfile.gettempdir() if folder is None else str(folder)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - it stays
        except OSError as error:
            raise WeightError(
                f"cannot create a file for streamed weights in {self._folder}: {error.strerror or error}; "
                "set zero.offload_param.nvme_path to a folder on a disk with enough space"
            ) from error
        # Closed with this object, not at exit, when a thread may still read.
        weakref.finalize(self, self._file.close).atexit = False

    def write(self, tensor: Tensor) -> Extent:
        """Append a contiguous tensor.

        Raises:
            WeightError: The disk is full or fails.
        """
        begin = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        data = tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy().data
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], begin + done)
        except OSError as error:
            raise WeightError(
                f"cannot write {len(data)} bytes of streamed weights to {self._folder}: "
                f"{error.strerror or error}; set zero.offload_param.nvme_path to a folder on a disk with "
                "enough space"
            ) from error
        self.size = begin + len(data)
        return Extent(self._file.fileno(), begin, len(data))


class Bay(ABC):
    """Memory for one layer at a time, at a fixed address.

    Attributes:
        memory: `(size,)` bytes.
        layer: The layer whose values it holds, or None.
        filling: Whether a thread is loading the layer.
        users: Number of leases that are computing with the layer.
        lane: Orders copies into the bay and kernels that read it.
    """

    memory: Tensor

    def __init__(self) -> None:
        """Start empty."""
        self.layer: int | None = None
        self.filling = False
        self.users = 0
        self.lane = Lane()

    @abstractmethod
    def fill(self, stored: Stored) -> None:
        """Load a layer.

        Raises:
            DeviceError: The layer cannot be read.
        """


class MappedBay(Bay):
    """A range of addresses into which pages of files are mapped, read-only."""

    def __init__(self, size: int, libc: ctypes.CDLL) -> None:
        """Reserve the addresses; they read as zeros.

        Raises:
            DeviceError: There is not enough address space.
        """
        super().__init__()
        self._libc = libc
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._address = self._map(None, size, flags, -1, 0)
        holder = (ctypes.c_char * size).from_address(self._address)
        weakref.finalize(holder, libc.munmap, self._address, size).atexit = False
        self.memory = torch.frombuffer(holder, dtype=torch.uint8)

    def fill(self, stored: Stored) -> None:
        """Map the ranges over the former mappings, which drops those pages, and read the new ones ahead."""
        for one, place in zip(stored.ranges, stored.places, strict=True):
            flags = mmap.MAP_SHARED | _FIXED | _POPULATE
            self._map(self._address + place, one.size, flags, one.file, one.begin)

    def _map(self, address: int | None, size: int, flags: int, file: int, begin: int) -> int:
        found: int | None = self._libc.mmap(address, size, mmap.PROT_READ, flags, file, begin)
        if found is None or found == ctypes.c_void_p(-1).value:
            reason = os.strerror(ctypes.get_errno())
            raise DeviceError(
                f"cannot map {size} bytes of streamed weights: {reason}; lower "
                "zero.offload_param.buffer_count"
            )
        return found


class CopiedBay(Bay):
    """Memory of a device into which layers are copied, through page-locked staging memory if there is any."""

    def __init__(self, size: int, device: Device, staging: Tensor | None) -> None:
        """Allocate.

        Args:
            size: Number of bytes.
            device: The device.
            staging: Host memory into which files are read first; None to read them into the bay itself.
        """
        super().__init__()
        self.memory = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        self.lane, self._staging = device.lane(), staging

    def fill(self, stored: Stored) -> None:
        """Copy the layer from host memory, or read its ranges from files."""
        if stored.host is not None:
            self.lane.copy(self.memory[: stored.size], stored.host)
            return
        target = self.memory if self._staging is None else self._staging
        view = target.numpy().data
        for one, place in zip(stored.ranges, stored.places, strict=True):
            _read(one, view[place : place + one.size])
        if self._staging is not None:
            self.lane.copy(self.memory[: stored.size], self._staging[: stored.size])
            self.lane.finish()


def _read(extent: Extent, target: memoryview) -> None:
    done = 0
    while done < extent.size:
        try:
            count = os.preadv(extent.file, [target[done:]], extent.begin + done)
        except OSError as error:
            raise DeviceError(f"cannot read streamed weights: {error.strerror or error}") from error
        if count == 0:
            raise DeviceError("the file of the streamed weights was truncated; restore it")
        done += count


def open_bays(sizes: Sequence[int], device: Device, *, pinned: bool) -> list[Bay]:
    """Open bays of the given sizes on a device.

    Args:
        sizes: For each bay, the bytes of its largest layer.
        device: Device on which the layers run.
        pinned: Use page-locked staging memory for reads on the way to the device.
    """
    if device.name == "cpu" and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        whole, offset = ctypes.c_size_t, ctypes.c_long
        libc.mmap.argtypes = (ctypes.c_void_p, whole, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset)
        libc.munmap.argtypes = (ctypes.c_void_p, whole)
        return [MappedBay(size, libc) for size in sizes]
    staging = None
    if device.torch_device.type != "cpu" or device.name != "cpu":
        staging = torch.empty(
            max(sizes), dtype=torch.uint8, pin_memory=pinned and torch.cuda.is_available(), device="cpu"
        )
    return [CopiedBay(size, device, staging) for size in sizes]
