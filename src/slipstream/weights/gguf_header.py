"""Validates the header of a GGUF file before it is used: every length, count and offset.

    magic, version, tensor count, pair count     "GGUF", u32, u64, u64
    pairs         key, type u32, value      (a string is u64 and bytes; an array type u32, count u64, values)
    tensors       name, dims u32, u64 each, type u32, offset u64
    data          at a multiple of `general.alignment`, offsets counted from there

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import WeightError

__all__ = ["TYPES", "GgufHeader", "GgufTensor", "is_gguf", "read_header"]

TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""For each of ggml's types: its name, the number of weights in a block, and the block's bytes."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
_MOST_DIMS, _MOST_DEPTH, _LONGEST_NAME = 4, 2, 1 << 16


def is_gguf(place: str | os.PathLike[str]) -> bool:
    """Whether a path has the suffix of a GGUF file, and is not a folder."""
    return os.fspath(place).lower().endswith(".gguf") and not os.path.isdir(place)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in the file.

    Attributes:
        kind: ggml's name of its type.
        shape: Shape in torch's order, outermost dim first.
        begin: First byte, from the start of the file.
        size: Size in bytes.
    """

    kind: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """The content of a header.

    Attributes:
        entries: Numbers and strings by key; arrays are None.
        tensors: Tensors by their names in the file.
    """

    entries: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read a file's header, checking that it and all tensors that it describes lie within the file.

    Raises:
        WeightError: Names the file and what is wrong with it.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _Walk(path, memory).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise WeightError(f"{path} cannot be read as a GGUF model: {reason}; fetch it again") from error


class _Walk:
    """A cursor that moves forward through the file and never beyond its end."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path, self._memory, self._at = path, memory, 0

    def _wrong(self, what: str) -> WeightError:
        return WeightError(f"{self._path} cannot be read as a GGUF model: {what}; fetch it again")

    def _take(self, size: int, what: str) -> int:
        """Consume the next `size` bytes and return the offset at which they begin."""
        if size > len(self._memory) - self._at:
            raise self._wrong(
                f"it is cut short: {what} takes {size} bytes at {self._at} of {len(self._memory)}"
            )
        self._at += size
        return self._at - size

    def _number(self, kind: str, what: str) -> Any:
        return struct.unpack_from(f"<{kind}", self._memory, self._take(struct.calcsize(f"<{kind}"), what))[0]

    def _string(self, what: str) -> bytes:
        size = self._number("Q", what)
        start = self._take(size, what)
        return self._memory[start : start + min(size, _LONGEST_NAME)]

    def _text(self, what: str) -> str:
        try:
            return self._string(what).decode()
        except UnicodeDecodeError:
            raise self._wrong(f"{what} at {self._at} is not UTF-8 text") from None

    def _value(self, what: str, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY or depth > _MOST_DEPTH:
            raise self._wrong(f"{what} has the unknown type {kind}")
        inner, count = self._number("I", what), self._number("Q", what)
        if inner in _SCALARS:
            self._take(count * struct.calcsize(f"<{_SCALARS[inner]}"), what)
        else:
            for _ in range(count):  # bounded: each takes at least 8 bytes of the file
                self._value(what, inner, depth + 1)
        return None

    def header(self) -> GgufHeader:
        if self._memory[:4] != b"GGUF":
            raise self._wrong("it does not begin with GGUF")
        self._at = 4
        version, tensors, pairs = (self._number(kind, "the header") for kind in "IQQ")
        if version not in (2, 3):
            raise self._wrong(f"version {version} is not 2 or 3")
        if tensors * _LEAST_TENSOR + pairs * _LEAST_PAIR > len(self._memory):
            raise self._wrong(
                f"{tensors} tensors and {pairs} entries do not fit into {len(self._memory)} bytes"
            )
        alignment = 32
        entries: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text("a key")
            if key in entries:
                raise self._wrong(f"{key[:80]} occurs twice")
            value = self._value(key[:80], self._number("I", key[:80]))
            entries[key] = value
            if key == "general.alignment":
                alignment = value
            if key.endswith(".block_count") and not (isinstance(value, int) and 0 < value <= tensors):
                raise self._wrong(f"{key[:80]} is {str(value)[:40]}, but there are {tensors} tensors")
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment is {str(alignment)[:40]}, which must be a power of two")
        found = [self._tensor() for _ in range(tensors)]
        if len({name for name, *_ in found}) < len(found):
            raise self._wrong("two tensors have the same name")
        start = -(-self._at // alignment) * alignment
        tensors_found, due = {}, 0
        for name, kind, shape, size, offset in found:
            tensors_found[name] = GgufTensor(kind, shape, start + offset, size)
            if offset != due:  # ggml checks the same
                raise self._wrong(f"{name!r} begins at {offset} of the data instead of {due}")
            due += -(-size // alignment) * alignment
            if start + offset + size > len(self._memory):
                raise self._wrong(
                    f"it is cut short: {name!r} takes {size} bytes at {start + offset} of {len(self._memory)}"
                )

        return GgufHeader(entries, tensors_found)

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Read a tensor's name, type, shape, size in bytes, and offset."""
        name = self._text("a tensor's name")[:80]
        dims = self._number("I", name)
        if not 0 < dims <= _MOST_DIMS:
            raise self._wrong(f"{name!r} has {dims} dims, but tensors have 1 to {_MOST_DIMS}")
        shape = [self._number("Q", name) for _ in range(dims)]
        kind, offset = self._number("I", name), self._number("Q", name)
        if kind not in TYPES:
            raise self._wrong(f"{name!r} has the unknown type {kind}")
        known, block, size = TYPES[kind]
        if 0 in shape or math.prod(shape) >= 1 << 62 or shape[0] % block:
            raise self._wrong(f"{name!r} has the shape {shape}, which is not a multiple of blocks of {block}")
        return name, known, tuple(reversed(shape)), math.prod(shape) // block * size, offset
