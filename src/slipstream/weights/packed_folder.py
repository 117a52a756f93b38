"""A folder of packed weights: a manifest, and planes in one mapped file, which the engine uses in place.

    slipstream.json       {"format", "version", "dtype", "quant", "matrices": {name: {...}}}
    planes.safetensors    planes, and every tensor that is not packed
    config.json, ...      the model's own configuration, and its tokenizer

A matrix is named after its parameter (`lm_head.weight`), or after layer and role (`model.layers.0:qkv`) where
a fused block holds several tensors as one; `pieces` then lists, in order, the tensors' rows that make it up.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import WeightError
from slipstream.formats import FORMATS, VARIANTS, Format
from slipstream.ops.linear import Weight
from slipstream.weights.checkpoint import weights_file
from slipstream.weights.recipe import Piece, scatter
from slipstream.weights.safe_file import SafeFile, write_safe
from slipstream.weights.source import Source

__all__ = ["MANIFEST", "Matrix", "PackedFolder", "is_packed_folder", "write_packed_folder"]

MANIFEST = "slipstream.json"
_PLANES = "planes.safetensors"
_FORMAT, _VERSION = "slipstream packed weights", 1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST_MANIFEST = 1 << 28


@dataclass(frozen=True)
class Matrix:
    """A packed matrix.

    Attributes:
        weight: The matrix without a bias, in canonical orientation.
        pieces: For a role, the pieces of its rows; empty where the matrix is one parameter.
        transposed: The parameter is stored `(..., I, O)`.
    """

    weight: Weight
    pieces: tuple[Piece, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class _Described:
    """A packed matrix as the manifest describes it; `pieces` and `transposed` are those of `Matrix`."""

    format: Format
    shape: tuple[int, ...]
    planes: tuple[str, ...]
    pieces: tuple[Piece, ...]
    transposed: bool


def is_packed_folder(place: Path) -> bool:
    """Whether a folder has a manifest."""
    return os.path.isfile(place / MANIFEST)  # a Path raises: the name may be too long for a file


def write_packed_folder(
    folder: Path,
    matrices: Mapping[str, Matrix],
    plain: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    quant: Mapping[str, Any],
) -> None:
    """Write planes and manifest into an existing folder.

    Args:
        folder: The folder.
        matrices: Packed matrices by name; planes that several share are written once.
        plain: All other tensors, by the model's names.
        dtype: Default dtype of an engine that opens the folder.
        quant: The section of the configuration by which the planes were packed.

    Raises:
        OSError: The folder cannot be written.
    """
    tensors: dict[str, Tensor] = {name: tensor.contiguous() for name, tensor in plain.items()}
    places: dict[tuple[int, int], str] = {}
    table: dict[str, Any] = {}
    for name, matrix in matrices.items():
        planes = []
        for index, plane in enumerate(matrix.weight.planes):
            key = places.setdefault((plane.data_ptr(), plane.nbytes), f"{name}:{index}")
            tensors[key] = plane
            planes.append(key)
        table[name] = {
            "format": matrix.weight.packed_as,
            "shape": list(matrix.weight.shape),
            "planes": planes,
            "transposed": matrix.transposed,
            "pieces": [_entry(piece) for piece in matrix.pieces],
        }
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "dtype": str(dtype).removeprefix("torch."),
        "quant": dict(quant),
        "matrices": table,
    }
    write_safe(folder / _PLANES, tensors, {"format": "pt", "made_by": _FORMAT})
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


class PackedFolder(Source):
    """A source of packed planes, which are used in place; the dense tensors can be read too.

    Attributes:
        dtype: Default dtype of the engine.
        quant: The section of the configuration by which the planes were packed.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder; every plane is checked against its format's layout before any is used.

        Raises:
            WeightError: The folder does not fit its manifest, or has other weights beside the packed ones.
                The message names the file.
        """
        self._path = folder / MANIFEST
        if (other := weights_file(folder)) is not None:
            raise WeightError(
                f"{folder} has packed weights ({MANIFEST}, {_PLANES}) and plain ones ({other.name}), "
                "and either may be outdated; remove those that should not be loaded"
            )
        table = _manifest(self._path)
        self._file = SafeFile(folder / _PLANES)
        self.dtype = _DTYPES[table["dtype"]]
        self.quant: dict[str, Any] = table["quant"]
        self._matrices: dict[str, _Described] = {}
        self._homes: dict[str, str] = {}
        used: set[str] = set()
        for name, entry in table["matrices"].items():
            self._matrices[name] = matrix = self._described(name, entry)
            used |= set(matrix.planes)
            for tensor in {piece.name for piece in matrix.pieces} or {name}:
                if tensor in self._homes or tensor in self._file.entries:
                    raise WeightError(f"{self._path}: {tensor} occurs twice")
                self._homes[tensor] = name
        self._plain = [name for name in self._file.entries if name not in used]

    def _described(self, name: str, entry: Any) -> _Described:
        where = f"{self._path}: {name}"
        shape, found = _shape(where, entry), _format(where, entry)
        layout = found.layout(shape)
        names = entry.get("planes")
        if not isinstance(names, list) or len(names) != len(layout):
            raise WeightError(
                f"{where}: {found.name} has {len(layout)} planes, but {str(names)[:200]} are given; quantize "
                "the original again, or install the Slipstream that wrote it"
            )
        for plane, (due, dtype) in zip(names, layout, strict=True):
            stored = self._file.entries.get(plane) if isinstance(plane, str) else None
            if stored is None:
                raise WeightError(f"{self._file.path} lacks the plane {plane!r} of {name}")
            if (stored.shape, stored.dtype) != (due, dtype):
                raise WeightError(
                    f"{self._file.path}: the plane {plane} has shape {stored.shape} in {stored.dtype}, but "
                    f"{found.name} of shape {shape} needs {due} in {dtype}; create the folder again"
                )
        transposed = entry.get("transposed", False)
        if not isinstance(transposed, bool):
            raise WeightError(f"{where}: transposed={str(transposed)[:40]} must be true or false")
        if len(set(names)) < len(names):
            raise WeightError(f"{where}: a plane is named twice; make the folder again")
        return _Described(found, shape, tuple(names), _pieces(where, entry, shape), transposed)

    def _weight(self, matrix: _Described, wanted: Format | None = None) -> Weight:
        """Return the mapped planes as a weight, with the rounding of input rows that `wanted` has."""
        planes = tuple(map(self._file.tensor, matrix.planes))
        weight = Weight(matrix.format.name, matrix.shape, planes, matrix.format.unpack, None, self.dtype)
        if wanted is None or wanted.rounding is None or len(matrix.shape) > 2:
            return weight
        return replace(weight, format=wanted.name, rounding=wanted.rounding)

    def names(self) -> Iterable[str]:
        """The model's names of packed and plain tensors."""
        return [*self._plain, *self._homes]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the model's tensor."""
        if name not in self._homes:
            return self._file.entries[name].shape
        matrix = self._matrices[self._homes[name]]
        *lead, rows, inputs = matrix.shape
        transposed = matrix.transposed
        if matrix.pieces:
            own = [piece for piece in matrix.pieces if piece.name == name]
            rows, transposed = sum(piece.count for piece in own), own[0].transposed
            if own[0].experts:
                return (lead[0] * inputs, rows) if transposed else (lead[0] * rows, inputs)
        return (*lead, inputs, rows) if transposed else (*lead, rows, inputs)

    def read(self, name: str) -> Tensor:
        """Return the dense tensor, unpacked if it is stored packed."""
        if name not in self._homes:
            return self._file.tensor(name)
        matrix = self._matrices[self._homes[name]]
        dense = self._weight(matrix).dense()
        if matrix.pieces:
            return scatter(matrix.pieces, dense)[name].contiguous()
        return dense.mT.contiguous() if matrix.transposed else dense

    def packed(self, name: str, wanted: Format, pieces: Sequence[Piece] = ()) -> Weight | None:
        """Return the mapped planes; for one tensor of a role, its rows of the role's planes.

        Raises:
            WeightError: The planes are in another format, or the role's rows are in another order.
        """
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._part(name, wanted)
        self._agree(name, matrix, wanted)
        if pieces and matrix.pieces != tuple(pieces):
            raise WeightError(
                f"{self._path}: {name} has rows in another order than this version's; create the folder again"
            )
        return self._weight(matrix, wanted)

    def _part(self, name: str, wanted: Format) -> Weight | None:
        home = self._homes.get(name)
        if home is None:
            return None
        matrix = self._matrices[home]
        self._agree(name, matrix, wanted)
        if any(piece.experts for piece in matrix.pieces):
            return None  # the model's own code has no matrix for a stack of experts
        pieces = [  # planes are in canonical orientation; `scatter` skips pieces without a name
            replace(piece, name=piece.name if piece.name == name else "", transposed=False)
            for piece in matrix.pieces
        ]
        weight = self._weight(matrix, wanted)
        *planes, factors = weight.planes
        rows = [scatter(pieces, plane)[name].contiguous() for plane in planes]
        vector = scatter([replace(piece, bias=True) for piece in pieces], factors)[name].contiguous()
        shape = (*matrix.shape[:-2], vector.shape[-1], matrix.shape[-1])
        return replace(weight, planes=(*rows, vector), shape=shape)

    def _agree(self, name: str, matrix: _Described, wanted: Format) -> None:
        if matrix.format.name != wanted.packed_as:
            raise WeightError(
                f"{self._path}: {name} is packed as {matrix.format.name}, but {wanted.packed_as} is "
                "requested; leave quant out, or quantize the original"
            )

    def stored(self, name: str) -> Tensor | None:
        """A plain tensor itself, or a packed matrix's scales (for its first tensor only, so once)."""
        home = self._homes.get(name)
        if home is None:
            return self._file.tensor(name)
        matrix = self._matrices[home]
        if matrix.pieces and matrix.pieces[0].name != name:
            return None
        planes = [p.float().flatten() for p in self._weight(matrix).planes if p.is_floating_point()]
        return torch.cat(planes)

    def views(self, name: str) -> Sequence[Tensor]:
        """A plain tensor, or the scales of a packed matrix."""
        stored = self.stored(name)
        return () if stored is None else (stored,)

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is part of a packed matrix."""
        return name in self._homes

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values; packed ones are the same only if they share planes."""
        if one not in self._homes and other not in self._homes:
            return super().same(one, other)
        planes = [self._matrices[n].planes if n in self._matrices else None for n in (one, other)]
        return planes[0] is not None and planes[0] == planes[1]

    def by_windows(self) -> None:
        """Map planes one by one."""
        self._file.windowed = True

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """The file's descriptor, and a view's first byte in the file."""
        return self._file.locate(tensor)

    def release(self, names: Iterable[str]) -> None:
        """Drop the pages of plain tensors."""
        for name in names:
            if name not in self._homes:
                self._file.release(name)

    def place(self, name: str) -> str:
        """The file and the name."""
        return f"{self._file.path}: {name}"

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of the model is there."""
        return name in self._homes or name in self._file.entries


def _manifest(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise WeightError(f"{path} is larger than {_LARGEST_MANIFEST >> 20} MiB, so it is not a manifest")
        table = json.loads(path.read_text())
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path} is not valid JSON ({str(error)[:80]}); create the folder again") from error
    if not isinstance(table, dict) or table.get("format") != _FORMAT:
        raise WeightError(f"{path} is not a manifest of packed weights")
    if table.get("version") != _VERSION:
        raise WeightError(
            f"{path} has the format version {str(table.get('version'))[:40]}, but this Slipstream reads "
            f"{_VERSION}; quantize the original again, or install the Slipstream that wrote it"
        )
    if not isinstance(table.get("dtype"), str) or table["dtype"] not in _DTYPES:
        raise WeightError(
            f"{path}: dtype={str(table.get('dtype'))[:40]!r} must be one of {', '.join(_DTYPES)}"
        )
    for key in ("quant", "matrices"):
        if not isinstance(table.get(key), dict):
            raise WeightError(f"{path}: {key} must be a table")
    return table


def _shape(where: str, entry: Any) -> tuple[int, ...]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    good = isinstance(shape, list) and all(type(size) is int and 0 < size < 1 << 40 for size in shape)
    if not good or shape is None or not 2 <= len(shape) <= 3 or math.prod(shape) >= 1 << 60:
        raise WeightError(f"{where} has the shape {str(shape)[:80]}, which is not that of a matrix")
    return tuple(shape)


def _format(where: str, entry: Mapping[str, Any]) -> Format:
    name = entry.get("format")
    found = (FORMATS | VARIANTS).get(name) if isinstance(name, str) else None
    if found is None or not found.bits:
        raise WeightError(
            f"{where} has the weight format {str(name)[:40]!r}, which this version does not know"
        )
    return found


def _pieces(where: str, entry: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[Piece, ...]:
    given = entry.get("pieces", [])
    kinds = [str, int, int, int, bool, int]
    good = isinstance(given, list) and all(
        isinstance(p, list)
        and len(p) in (5, 6)
        and [type(v) for v in p] == kinds[: len(p)]
        and p[1] >= 0
        and min(p[2:4]) > 0
        and p[5:] in ([], [0], [*shape[:-2]])
        for p in given
    )
    if not good or (given and sum(p[2] for p in given) != shape[-2]):
        raise WeightError(f"{where}: its pieces do not add up to its shape {shape}; create the folder again")
    pieces = tuple(Piece(p[0], p[1], p[2], p[3], p[4], experts=0 if len(p) < 6 else p[5]) for p in given)
    if any(
        not _covers([piece for piece in pieces if piece.name == name]) for name in {p.name for p in pieces}
    ):
        raise WeightError(f"{where}: its pieces leave out rows of a tensor; create the folder again")
    return pieces


def _covers(pieces: Sequence[Piece]) -> bool:
    """Whether the pieces cover all rows of a tensor exactly once."""
    covered = torch.zeros(sum(piece.count for piece in pieces), dtype=torch.bool, device="cpu")
    for piece in pieces:
        last = piece.start + (piece.count - 1) * piece.step
        if last < len(covered):
            covered[piece.start : last + 1 : piece.step] = True
    return bool(covered.all())


def _entry(piece: Piece) -> list[Any]:
    """A piece as the manifest lists it."""
    one = [piece.name, piece.start, piece.count, piece.step, piece.transposed]
    return [*one, piece.experts] if piece.experts else one
