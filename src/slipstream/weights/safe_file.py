"""Safetensors files: headers are validated before use, and tensors are views of the mapped file.

    8 bytes    length of the header, little-endian
    header     JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)}, and "__metadata__"
    data       the tensors, one after the other, without holes

Source: https://github.com/huggingface/safetensors, README.md, "Format".
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import WeightError
from slipstream.weights.source import Source, TwiceError, same_values

__all__ = ["Entry", "SafeFile", "SafeSource", "write_safe"]

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000
_MOST_DIMS = 16
_ALIGNMENT = 64
_CHUNK = 1 << 26


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: Element type.
        shape: Shape as stored.
        begin: First byte, from the start of the file.
        end: One past the last byte.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class _Window:
    """A mapping of one tensor's part of the file; it lives as long as a view of it.

    Attributes:
        memory: The mapping.
        begin: Offset of the mapping's first byte in the file.
        address: Address of that byte in memory.
        size: Size of the mapping in bytes.
    """

    memory: weakref.ref[mmap.mmap]
    begin: int
    address: int
    size: int


class SafeFile:
    """A mapped file. Its pages are read when a view is used, and a write to a view stays in this process.

    Attributes:
        path: Path of the file.
        entries: Every tensor by name.
        metadata: Strings by name.
        windowed: Map each tensor by itself, for as long as it is in use, instead of the whole file, which may
            be larger than the address space that the process is allowed.
    """

    def __init__(self, path: Path) -> None:
        """Map a file and check its header.

        Raises:
            WeightError: The file cannot be read, is cut short, or its header does not describe it.
        """
        self.path, self.windowed = path, False
        self._memory: mmap.mmap | None = None
        self._windows: dict[str, _Window] = {}
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header, start = _header(path, file.read(8), size, file)
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise WeightError(f"{path} cannot be read: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self._file)
        self.metadata = _metadata(path, header.pop("__metadata__", {}))
        self.entries = _entries(path, header, start, size)

    def tensor(self, name: str) -> Tensor:
        """Return a view of a tensor; it keeps the file, or its own part of the file, mapped.

        Raises:
            WeightError: The file cannot be mapped.
        """
        entry = self.entries[name]
        if entry.end == entry.begin:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        size = entry.end - entry.begin
        memory, begin = self._mapped(name, entry)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=entry.begin - begin)
        if self.windowed:
            address = flat.data_ptr() - (entry.begin - begin)
            self._windows[name] = _Window(weakref.ref(memory), begin, address, len(memory))
        if entry.begin % entry.dtype.itemsize:
            flat = flat.clone()  # torch cannot view unaligned elements
        return flat.view(entry.dtype).view(entry.shape)

    def _mapped(self, name: str, entry: Entry) -> tuple[mmap.mmap, int]:
        """Return a mapping that contains a tensor, and the mapping's first byte in the file."""
        known = self._windows.get(name)
        memory = self._memory if known is None else known.memory()
        if memory is not None:
            return memory, 0 if known is None else known.begin
        begin = entry.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            if self.windowed:
                size = entry.end - begin
                return mmap.mmap(self._file, size, access=mmap.ACCESS_COPY, offset=begin), begin
            self._memory = mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: the file was truncated in the meantime
            raise WeightError(f"{self.path} cannot be mapped: {error}") from error
        return self._memory, 0

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the file's descriptor and a contiguous view's first byte; None unless `windowed`."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for window in self._windows.values():
            if (
                window.address <= begin
                and end <= window.address + window.size
                and window.memory() is not None
            ):
                return self._file, window.begin + begin - window.address
        return None

    def prefetch(self, name: str) -> None:
        """Ask the system to read a tensor's pages ahead."""
        if self.windowed and hasattr(os, "posix_fadvise"):
            entry = self.entries[name]
            os.posix_fadvise(self._file, entry.begin, entry.end - entry.begin, os.POSIX_FADV_WILLNEED)
        else:
            self._advise(name, "MADV_WILLNEED", inwards=False)

    def release(self, name: str) -> None:
        """Drop a tensor's pages, with anything written to them; later accesses read the file again."""
        self._advise(name, "MADV_DONTNEED", inwards=True)

    def _advise(self, name: str, advice: str, *, inwards: bool) -> None:
        option = getattr(mmap, advice, None)
        known = self._windows.get(name)
        memory = self._memory if known is None else known.memory()
        if option is None or memory is None:
            return
        entry, page = self.entries[name], mmap.PAGESIZE
        first = 0 if known is None else known.begin
        # A page that a neighbour shares is not dropped: the neighbour may have been written to.
        begin = -(-entry.begin // page) * page if inwards else entry.begin // page * page
        end = entry.end // page * page if inwards else entry.end
        if end > begin:
            memory.madvise(option, begin - first, end - begin)


def _header(path: Path, first: bytes, size: int, file: Any) -> tuple[dict[str, Any], int]:
    """Return the parsed header and the offset at which the data begin."""
    if len(first) < 8:
        raise WeightError(f"{path} is cut short: {size} bytes, less than the header alone; fetch it again")
    (length,) = struct.unpack("<Q", first)
    if length > min(size - 8, _LONGEST_HEADER):
        raise WeightError(
            f"{path}: the header should have {length} bytes, but the file has {size}; it is cut short or not "
            "a safetensors file; fetch it again"
        )
    try:
        header = json.loads(file.read(length), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path}: the header is not JSON ({_short(error)}); fetch it again") from error
    if not isinstance(header, dict):
        raise WeightError(f"{path}: the header is a {type(header).__name__}, not a table of tensors")
    return header, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _metadata(path: Path, given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise WeightError(f"{path}: __metadata__ must hold strings")
    return dict(given)


def _entries(path: Path, header: Mapping[str, Any], start: int, size: int) -> dict[str, Entry]:
    """Parse every tensor's entry, and check that together they tile the rest of the file."""
    entries = {name: _entry(path, name, described, start) for name, described in header.items()}
    reached = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            raise WeightError(
                f"{path}: {name!r} begins at byte {entry.begin} instead of {reached}; the header is wrong"
            )
        reached = entry.end
        if reached > size:
            raise WeightError(
                f"{path} is cut short: {name!r} ends at byte {reached} of {size}; fetch it again"
            )
    if reached != size:
        raise WeightError(f"{path}: {size - reached} bytes follow the last tensor; the file is damaged")
    return entries


def _entry(path: Path, name: str, given: Any, start: int) -> Entry:
    if not isinstance(given, dict) or given.keys() != {"dtype", "shape", "data_offsets"}:
        raise WeightError(
            f"{path}: {name!r} needs a dtype, a shape and data_offsets, but has {_short(given)}"
        )
    dtype = DTYPES.get(given["dtype"]) if isinstance(given["dtype"], str) else None
    if dtype is None:
        raise WeightError(
            f"{path}: {name!r} has the dtype {_short(given['dtype'])}, not one of {', '.join(DTYPES)}"
        )
    shape, offsets = given["shape"], given["data_offsets"]
    if not _sizes(shape) or len(shape) > _MOST_DIMS or math.prod(s or 1 for s in shape) >= 1 << 62:
        raise WeightError(f"{path}: {name!r} has the invalid shape {_short(shape)}")
    if not _sizes(offsets) or len(offsets) != 2:
        raise WeightError(
            f"{path}: {name!r} has the data_offsets {_short(offsets)}; two byte offsets are needed"
        )
    needed = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != needed:
        raise WeightError(
            f"{path}: {name!r} of shape {tuple(shape)} in {given['dtype']} takes {needed} bytes, but its "
            f"data_offsets {offsets} cover {offsets[1] - offsets[0]}"
        )
    return Entry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


class SafeSource(Source):
    """The tensors of one or several safetensors files."""

    def __init__(self, files: Iterable[SafeFile]) -> None:
        """Join the files.

        Raises:
            TwiceError: Two files have a tensor of the same name with different values.
        """
        self._files: dict[str, SafeFile] = {}
        for file in files:
            for name in file.entries:
                first = self._files.setdefault(name, file)
                if first is file:
                    continue
                if not same_values(first.tensor(name), file.tensor(name)):
                    raise TwiceError(
                        f"{file.path}: {name!r} is also in {first.path.name}, with different values; remove "
                        "the file that does not belong there"
                    )
                for either in (first, file):
                    either.release(name)

    def names(self) -> Iterable[str]:
        """Every tensor's name."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return self._files[name].entries[name].shape

    def read(self, name: str) -> Tensor:
        """A view of the mapped file."""
        return self._files[name].tensor(name)

    def views(self, name: str) -> Sequence[Tensor]:
        """The view of the mapped file, as the only element."""
        return (self.read(name),)

    def by_windows(self) -> None:
        """Map tensors one by one."""
        for file in self._files.values():
            file.windowed = True

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """The descriptor of the file that a view is in, and the view's first byte there."""
        found = (file.locate(tensor) for file in dict.fromkeys(self._files.values()))
        return next((place for place in found if place is not None), None)

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the system to read ahead."""
        for name in names:
            self._files[name].prefetch(name)

    def release(self, names: Iterable[str]) -> None:
        """Drop the tensors' pages."""
        for name in names:
            self._files[name].release(name)

    def place(self, name: str) -> str:
        """The file and the name."""
        return f"{self._files[name].path}: {name}"

    def __contains__(self, name: str) -> bool:
        """Whether a file has the name."""
        return name in self._files


def write_safe(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, one tensor at a time: no tensor is copied as a whole.

    Tensors begin at multiples of 64 bytes where possible: those whose size is a multiple of 64 come first.

    Args:
        path: Overwritten if it exists.
        tensors: Tensors by name, in dtypes that the format has.
        metadata: Strings by name.

    Raises:
        WeightError: The format lacks a dtype, or the machine is not little-endian as the format is.
        OSError: The file cannot be written.
    """
    if sys.byteorder != "little":
        raise WeightError(
            "safetensors files are little-endian, but this machine is not; write them on another machine"
        )
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    order = sorted(tensors, key=lambda name: (-math.gcd(tensors[name].nbytes, _ALIGNMENT), name))
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise WeightError(f"{name} is {tensor.dtype}, which safetensors does not support; convert it")
        place = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            flat = tensors[name].detach().contiguous().view(-1)
            step = max(1, _CHUNK // max(1, flat.element_size()))
            for start in range(0, len(flat), step):
                file.write(flat[start : start + step].cpu().view(torch.uint8).numpy().data)
