"""The C structs of `native/abi.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.kernels.cpu.abi_block import (
    Across,
    Block,
    Inputs,
    Latent,
    Mask,
    Moe,
    Multipliers,
    Part,
    Recurrence,
    Streams,
)
from slipstream.kernels.cpu.abi_types import (
    CODES,
    FACTORS,
    MINIMA,
    SCALES,
    UPPER,
    Fields,
    Matrix,
    Norm,
    Run,
    Scale,
    each,
)

__all__ = [
    "ABI",
    "CODES",
    "DTYPES",
    "FACTORS",
    "FORMATS",
    "MINIMA",
    "SCALES",
    "UPPER",
    "BOOLEAN",
    "BRANCHES",
    "INT8_CODES",
    "GATES",
    "KEYS_VALUES",
    "SCORINGS",
    "Across",
    "AttentionCall",
    "Bias",
    "Block",
    "Cache",
    "ExpertsCall",
    "FeedCall",
    "Inputs",
    "Latent",
    "LinearCall",
    "Mask",
    "Matrix",
    "Moe",
    "Multipliers",
    "Norm",
    "NormCall",
    "PackCall",
    "PagedAttentionCall",
    "Part",
    "Recurrence",
    "Run",
    "Scale",
    "StackCall",
    "Step",
    "Streams",
    "Strided",
    "Table",
    "Fields",
    "address",
    "each",
]

ABI = 31
"""`kAbi` of the header that this file mirrors; the library must have the same."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The library's numbers of the dtypes that it reads."""

INT8_CODES, BOOLEAN = 3, 4
"""Further dtype numbers: int8 codes of cached keys and values, and boolean masks."""

_INPUTS = ("", "-a8", "-a8-asym")

FORMATS = {
    "plain": 0,
    **{f"int8{rounded}": 1 for rounded in _INPUTS},
    **{f"{name}{rounded}": 2 for name in ("int4", "int4-g64", "int4-g128") for rounded in _INPUTS},
    **{f"int4-g{group}-sym{rounded}": 3 for group in (32, 64, 128) for rounded in _INPUTS},
    "fp8": 4,
    "fp6": 5,
    "fp6-e3m2": 6,
    "bf13": 7,
}
"""The library's numbers of the weight formats that it reads."""

KEYS_VALUES = {"own": 0, "keys": 1, "borrows": 2}
"""The library's numbers of where a block's keys and values come from."""

BRANCHES = {"both": 0, "attention": 1, "feed_forward": 2}
SCORINGS = {"softmax_topk": 0, "topk_softmax": 1, "sparsemixer": 2, "sigmoid": 3, "topk_sigmoid": 4}
"""The library's numbers of the ways to choose experts."""

GATES = {"sigmoid": 1, "softplus": 2}
"""The library's numbers of the activations of a gate on the attention output."""


class Step(ctypes.Structure):
    """The tokens, sequences, lengths and cache slots of one step."""

    _fields_: ClassVar[Fields] = [
        *each(c_int64, "tokens sequences table_width cache_blocks block_size"),
        *each(c_void_p, "query_starts kv_lens block_table slots"),
        ("past", c_int64),
        *each(c_int32, "heads_first unused"),
        ("states", c_void_p),
        ("num_states", c_int64),
    ]


class Table(ctypes.Structure):
    """Rotary cosines and sines, with a row per packed token or per position."""

    _fields_: ClassVar[Fields] = [*each(c_void_p, "cos sin"), *each(c_int64, "rows half")]


class LinearCall(ctypes.Structure):
    """Arguments of `slipstream_linear`."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "x out"),
        ("rows", c_int64),
        *each(c_int32, "dtype unused"),
        ("weight", Matrix),
    ]


class FeedCall(ctypes.Structure):
    """Arguments of `slipstream_feed`."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "x out"),
        ("rows", c_int64),
        *each(c_int32, "dtype activation gated gate_last"),
        *each(Matrix, "first last"),
    ]


class ExpertsCall(ctypes.Structure):
    """Arguments of `slipstream_experts`."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "x out weights chosen"),
        *each(c_int64, "rows hidden ffn"),
        *each(c_int32, "dtype activation gated unused"),
        ("moe", Moe),
    ]


class NormCall(ctypes.Structure):
    """Arguments of `slipstream_norm`."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "x out"),
        *each(c_int64, "rows width"),
        *each(c_int32, "dtype unused"),
        ("norm", Norm),
    ]


class Cache(ctypes.Structure):
    """Keys and values of one layer, and the states of its recurrence."""

    _fields_: ClassVar[Fields] = each(c_void_p, "k v k_scales v_scales past_k past_v states")


class PagedAttentionCall(ctypes.Structure):
    """Arguments of `slipstream_paged_attention`."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "q out"),
        ("cache", Cache),
        *each(c_int64, "heads kv_heads head_dim"),
        *each(c_int32, "dtype cache_dtype"),
        ("mask", Mask),
        ("step", Step),
    ]


class Strided(ctypes.Structure):
    """A tensor `(batch, rows, heads, D)` with any strides except in its last dimension."""

    _fields_: ClassVar[Fields] = [("data", c_void_p), *each(c_int64, "batch row head")]


class Bias(ctypes.Structure):
    """A bias that is added to attention scores, or a boolean mask."""

    _fields_: ClassVar[Fields] = [
        ("data", c_void_p),
        *each(c_int64, "batch head row"),
        *each(c_int32, "dtype unused"),
    ]


class AttentionCall(ctypes.Structure):
    """Arguments of `slipstream_attention`."""

    _fields_: ClassVar[Fields] = [
        *each(Strided, "q k v"),
        ("out", c_void_p),
        *each(c_int64, "batch queries keys heads kv_heads head_dim"),
        *each(c_int32, "dtype causal"),
        ("mask", Mask),
        ("bias", Bias),
    ]


class StackCall(ctypes.Structure):
    """Arguments of `slipstream_stack`."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "x out"),
        ("blocks", POINTER(Block)),
        ("num_blocks", c_int64),
        ("caches", POINTER(Cache)),
        ("tables", POINTER(Table)),
        ("num_tables", c_int64),
        *each(c_void_p, "positions places inputs"),
        ("inputs_stride", c_int64),
        *each(c_int32, "dtype cache_dtype"),
        ("step", Step),
        *each(c_void_p, "turn failed"),
    ]


class PackCall(ctypes.Structure):
    """Arguments of `slipstream_pack`."""

    _fields_: ClassVar[Fields] = [
        ("dense", c_void_p),
        ("stride", c_int64),
        *each(c_int32, "dtype unused"),
        ("packed", Matrix),
    ]


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's data, or None (a null pointer) for None."""
    return None if tensor is None else tensor.data_ptr()
