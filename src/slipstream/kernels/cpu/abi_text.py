"""The C structs of whole text encoders in `native/abi.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from typing import ClassVar

from slipstream.kernels.cpu.abi import Fields, Matrix, Norm, StackCall, each

__all__ = ["Lookup", "TextCall"]


class Lookup(ctypes.Structure):
    """An embedding table and the row of each token in it."""

    _fields_: ClassVar[Fields] = [
        ("table", c_void_p),
        ("rows", c_int64),
        ("at", c_void_p),
        *each(c_int64, "first period"),
        *each(c_int32, "dtype unused"),
    ]


class TextCall(ctypes.Structure):
    """Arguments of `slipstream_text`."""

    _fields_: ClassVar[Fields] = [
        ("stack", StackCall),
        ("lookups", Lookup * 3),
        ("width", c_int64),
        ("norm", Norm),
        *each(Matrix, "project_in pooler"),
        *each(c_void_p, "pooled_tokens pooled"),
    ]
