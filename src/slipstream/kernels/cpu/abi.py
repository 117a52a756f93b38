"""The C structs of `native/abi.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

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
    "LinearCall",
    "Mask",
    "Matrix",
    "Moe",
    "Norm",
    "NormCall",
    "PackCall",
    "PagedAttentionCall",
    "Run",
    "Scale",
    "StackCall",
    "Step",
    "Strided",
    "Table",
    "Fields",
    "address",
    "each",
]

ABI = 28
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

CODES, SCALES, MINIMA, UPPER, FACTORS = range(5)
"""Indices of the planes of a packed matrix."""

KEYS_VALUES = {"own": 0, "keys": 1, "borrows": 2}
"""The library's numbers of where a block's keys and values come from."""

BRANCHES = {"both": 0, "attention": 1, "feed_forward": 2}
SCORINGS = {"softmax_topk": 0, "topk_softmax": 1, "sparsemixer": 2, "sigmoid": 3, "topk_sigmoid": 4}
"""The library's numbers of the ways to choose experts."""

GATES = {"sigmoid": 1, "softplus": 2}
"""The library's numbers of the activations of a gate on the attention output."""

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


class Mask(ctypes.Structure):
    """What, besides causality, decides which keys are attended to and how much."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "alibi sinks"),
        *each(c_float, "scale softcap"),
        *each(c_int32, "window sinks_dtype"),
        ("relative", c_void_p),
        *each(c_int64, "reach zero"),
    ]


class Moe(ctypes.Structure):
    """A mixture of experts."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "experts_in experts_out"),
        *each(c_int64, "experts top_k shared groups top_groups"),
        *each(c_void_p, "choice expert_scale"),
        *each(c_float, "jitter more_sum least_sum factor router_scale"),
        *each(c_int32, "scoring normalize sums_two choice_dtype expert_scale_dtype weighs_input beside"),
        *each(Norm, "router_norm entry_norm shared_norm norm"),
        *each(Matrix, "router shared_in shared_out shared_gate"),
    ]


class Scale(ctypes.Structure):
    """A factor per channel, or none."""

    _fields_: ClassVar[Fields] = [("weight", c_void_p), *each(c_int32, "dtype unused")]


class Across(ctypes.Structure):
    """A block's cross-attention to an encoder's states."""

    _fields_: ClassVar[Fields] = [
        *each(Norm, "norm post_norm"),
        *each(Matrix, "q out"),
        *each(c_void_p, "k v seen"),
        ("states", c_int64),
        ("mask", Mask),
        *each(c_int32, "dtype unused"),
    ]


class Latent(ctypes.Structure):
    """A block's latent attention."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "keys values"),
        *each(c_int64, "rank plain rotated value"),
        *each(c_float, "query_scale latent_scale"),
        *each(c_int32, "apart unused"),
        *each(Norm, "query_norm norm"),
        *each(Matrix, "query_down down up"),
    ]


class Part(ctypes.Structure):
    """One of the inputs of a recurrence, by key head."""

    _fields_: ClassVar[Fields] = [
        *each(c_int64, "matrix start step channel"),
        ("scale", c_float),
        ("unused", c_int32),
    ]


class Recurrence(ctypes.Structure):
    """A mixer in place of attention or beside it, whose state per sequence has a fixed size."""

    _fields_: ClassVar[Fields] = [
        ("projections", c_void_p),
        ("num_projections", c_int64),
        *each(c_void_p, "kernel kernel_bias"),
        *each(c_int64, "channels width key_heads value_heads key_dim value_dim"),
        *each(Part, "q k v gate rate decay"),
        ("out", Matrix),
        *each(c_void_p, "speed shift skip"),
        ("norm", Norm),
        ("norm_width", c_int64),
        *each(c_float, "least_step rate_scale"),
        *each(c_int32, "rule gate_first kernel_dtype bias_dtype speed_dtype shift_dtype skip_dtype unused"),
    ]


class Multipliers(ctypes.Structure):
    """Constants inside a block."""

    _fields_: ClassVar[Fields] = each(c_float, "attention_in keys attention_out mixer_out feed_in feed_out")


class Inputs(ctypes.Structure):
    """A block's third branch, whose gate is opened by an input of its own for each token."""

    _fields_: ClassVar[Fields] = [("width", c_int64), *each(Matrix, "gate out"), ("norm", Norm)]


class Block(ctypes.Structure):
    """One transformer block."""

    _fields_: ClassVar[Fields] = [
        *each(c_int64, "hidden heads kv_heads head_dim ffn"),
        *each(c_int32, "post parallel residual_from_norm gated"),
        *each(c_int32, "activation qk_norm qk_norm_after_rope table rope_interleaved"),
        *each(c_float, "residual_scale clip growth growth_period growth_offset"),
        *each(c_int32, "causal gate gates_heads branches keys_values beside"),
        ("mask", Mask),
        *each(Scale, "attn_scale mlp_scale layer_scale"),
        *each(Norm, "attn_norm attn_post_norm mlp_norm mlp_post_norm q_norm k_norm v_norm"),
        *each(Matrix, "qkv attn_out mlp_in mlp_out"),
        ("moe", POINTER(Moe)),
        ("across", POINTER(Across)),
        ("latent", POINTER(Latent)),
        ("recurrence", POINTER(Recurrence)),
        ("multipliers", POINTER(Multipliers)),
        ("inputs", POINTER(Inputs)),
    ]


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
