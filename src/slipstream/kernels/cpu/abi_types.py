"""The C structs of `native/abi_types.h` that describe single tensors, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

__all__ = [
    "CODES",
    "FACTORS",
    "MINIMA",
    "SCALES",
    "UPPER",
    "Fields",
    "Matrix",
    "Norm",
    "Run",
    "Scale",
    "each",
]

CODES, SCALES, MINIMA, UPPER, FACTORS = range(5)
"""Indices of the planes of a packed matrix."""

Fields = list[tuple[str, type]]


def each(kind: type, names: str) -> Fields:
    """Return struct fields of one type, given their names separated by spaces."""
    return [(name, kind) for name in names.split()]


class Run(ctypes.Structure):
    """Consecutive rows of a dense matrix."""

    _fields_: ClassVar[Fields] = [
        ("data", c_void_p),
        *each(c_int64, "rows stride"),
        *each(c_int32, "transposed unused"),
    ]


class Matrix(ctypes.Structure):
    """A matrix with its bias: dense in runs of rows, or packed in planes.

    Attributes:
        memory: What `runs` points to; a copy of the struct does not keep it alive.
    """

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "runs bias"),
        *each(c_int64, "num_runs outputs inputs"),
        *each(c_int32, "dtype bias_dtype format group input_bits input_zero"),
        ("planes", c_void_p * (FACTORS + 1)),
        ("plane_bytes", c_int64 * (FACTORS + 1)),
    ]
    memory: ctypes.Array[Run]


class Norm(ctypes.Structure):
    """A norm of vectors: RMSNorm, LayerNorm or none."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "weight bias"),
        ("count", c_int64),
        *each(c_float, "eps offset"),
        *each(c_int32, "kind weight_dtype bias_dtype unused"),
    ]


class Scale(ctypes.Structure):
    """A factor per channel, or none."""

    _fields_: ClassVar[Fields] = [("weight", c_void_p), *each(c_int32, "dtype unused")]
