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
    "INT8_CODES",
    "SCORINGS",
    "AttentionCall",
    "Bias",
    "Block",
    "Cache",
    "Draw",
    "DrawCall",
    "FeedCall",
    "Frame",
    "LinearCall",
    "Lookup",
    "Mask",
    "Matrix",
    "ModelCall",
    "Moe",
    "Norm",
    "NormCall",
    "PackCall",
    "PagedAttentionCall",
    "Run",
    "Screen",
    "SketchCall",
    "StackCall",
    "Step",
    "Strided",
    "Table",
    "TextCall",
    "address",
]

ABI = 19
"""`kAbi` of the header that this file mirrors."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Storage types that the library reads."""

INT8_CODES, BOOLEAN = 3, 4
"""Storage types of cached keys and values, and of masks."""

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
"""Weight formats that the library reads, by their number."""

CODES, SCALES, MINIMA, UPPER, FACTORS = range(5)
"""Where a packed matrix has its planes."""

SCORINGS = {"softmax_topk": 0, "topk_softmax": 1, "sparsemixer": 2}
"""Ways to choose experts by their number."""

_Fields = list[tuple[str, type]]


def _each(kind: type, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class Run(ctypes.Structure):
    """Some rows of a dense matrix."""

    _fields_: ClassVar[_Fields] = [
        ("data", c_void_p),
        *_each(c_int64, "rows stride"),
        *_each(c_int32, "transposed unused"),
    ]


class Matrix(ctypes.Structure):
    """A matrix with its bias: dense in runs of rows, or packed in planes.

    Attributes:
        memory: What `runs` points to; whoever copies the struct keeps it.
    """

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "runs bias"),
        *_each(c_int64, "num_runs outputs inputs"),
        *_each(c_int32, "dtype bias_dtype format group input_bits input_zero"),
        ("planes", c_void_p * (FACTORS + 1)),
        ("plane_bytes", c_int64 * (FACTORS + 1)),
    ]
    memory: ctypes.Array[Run]


class Norm(ctypes.Structure):
    """A vector norm."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "weight bias"),
        ("count", c_int64),
        *_each(c_float, "eps offset"),
        *_each(c_int32, "kind weight_dtype bias_dtype unused"),
    ]


class Mask(ctypes.Structure):
    """Which keys count and how much."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "alibi sinks"),
        *_each(c_float, "scale softcap"),
        *_each(c_int32, "window sinks_dtype"),
    ]


class Moe(ctypes.Structure):
    """A mixture of experts."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "experts_in experts_out"),
        *_each(c_int64, "experts top_k shared"),
        ("jitter", c_float),
        *_each(c_int32, "scoring normalize unused"),
        *_each(Matrix, "router shared_in shared_out shared_gate"),
    ]


class Block(ctypes.Structure):
    """One transformer block."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_int64, "hidden heads kv_heads head_dim ffn"),
        *_each(c_int32, "post parallel residual_from_norm gated"),
        *_each(c_int32, "activation qk_norm qk_norm_after_rope table rope_interleaved"),
        *_each(c_float, "residual_scale clip"),
        ("causal", c_int32),
        ("mask", Mask),
        *_each(Norm, "attn_norm attn_post_norm mlp_norm mlp_post_norm q_norm k_norm"),
        *_each(Matrix, "qkv attn_out mlp_in mlp_out"),
        ("moe", POINTER(Moe)),
    ]


class Step(ctypes.Structure):
    """What one step computes."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_int64, "tokens sequences table_width cache_blocks block_size"),
        *_each(c_void_p, "query_starts kv_lens block_table slots"),
        ("past", c_int64),
        *_each(c_int32, "heads_first unused"),
    ]


class Table(ctypes.Structure):
    """Cosines and sines by row: of the packed tokens, or of positions."""

    _fields_: ClassVar[_Fields] = [*_each(c_void_p, "cos sin"), *_each(c_int64, "rows half")]


class LinearCall(ctypes.Structure):
    """Arguments of `slipstream_linear`."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "x out"),
        ("rows", c_int64),
        *_each(c_int32, "dtype unused"),
        ("weight", Matrix),
    ]


class FeedCall(ctypes.Structure):
    """Arguments of `slipstream_feed`."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "x out"),
        ("rows", c_int64),
        *_each(c_int32, "dtype activation gated gate_last"),
        *_each(Matrix, "first last"),
    ]


class NormCall(ctypes.Structure):
    """Arguments of `slipstream_norm`."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "x out"),
        *_each(c_int64, "rows width"),
        *_each(c_int32, "dtype unused"),
        ("norm", Norm),
    ]


class Cache(ctypes.Structure):
    """Keys and values of one layer."""

    _fields_: ClassVar[_Fields] = _each(c_void_p, "k v k_scales v_scales past_k past_v")


class PagedAttentionCall(ctypes.Structure):
    """Arguments of `slipstream_paged_attention`."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "q out"),
        ("cache", Cache),
        *_each(c_int64, "heads kv_heads head_dim"),
        *_each(c_int32, "dtype cache_dtype"),
        ("mask", Mask),
        ("step", Step),
    ]


class Strided(ctypes.Structure):
    """A tensor of heads in any order."""

    _fields_: ClassVar[_Fields] = [("data", c_void_p), *_each(c_int64, "batch row head")]


class Bias(ctypes.Structure):
    """What is added to scores, or hides keys."""

    _fields_: ClassVar[_Fields] = [
        ("data", c_void_p),
        *_each(c_int64, "batch head row"),
        *_each(c_int32, "dtype unused"),
    ]


class AttentionCall(ctypes.Structure):
    """Arguments of `slipstream_attention`."""

    _fields_: ClassVar[_Fields] = [
        *_each(Strided, "q k v"),
        ("out", c_void_p),
        *_each(c_int64, "batch queries keys heads kv_heads head_dim"),
        *_each(c_int32, "dtype causal"),
        ("mask", Mask),
        ("bias", Bias),
    ]


class StackCall(ctypes.Structure):
    """Arguments of `slipstream_stack`."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "x out"),
        ("blocks", POINTER(Block)),
        ("num_blocks", c_int64),
        ("caches", POINTER(Cache)),
        ("tables", POINTER(Table)),
        ("num_tables", c_int64),
        ("positions", c_void_p),
        *_each(c_int32, "dtype cache_dtype"),
        ("step", Step),
        *_each(c_void_p, "turn failed"),
    ]


class Lookup(ctypes.Structure):
    """What a table holds of each token."""

    _fields_: ClassVar[_Fields] = [
        ("table", c_void_p),
        ("rows", c_int64),
        ("at", c_void_p),
        *_each(c_int64, "first period"),
        *_each(c_int32, "dtype unused"),
    ]


class TextCall(ctypes.Structure):
    """Arguments of `slipstream_text`."""

    _fields_: ClassVar[_Fields] = [
        ("stack", StackCall),
        ("lookups", Lookup * 3),
        ("width", c_int64),
        ("norm", Norm),
        *_each(Matrix, "project_in pooler"),
        *_each(c_void_p, "pooled_tokens pooled"),
    ]


class PackCall(ctypes.Structure):
    """Arguments of `slipstream_pack`."""

    _fields_: ClassVar[_Fields] = [
        ("dense", c_void_p),
        ("stride", c_int64),
        *_each(c_int32, "dtype unused"),
        ("packed", Matrix),
    ]


class Draw(ctypes.Structure):
    """How tokens are drawn."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "numbers noise generator places seen"),
        ("rows", c_int64),
        ("penalty", c_float),
        ("best", c_int32),
    ]


class DrawCall(ctypes.Structure):
    """Arguments of `slipstream_draw`."""

    _fields_: ClassVar[_Fields] = [
        *_each(c_void_p, "scores out"),
        *_each(c_int64, "rows vocabulary"),
        *_each(c_int32, "dtype unused"),
        ("draw", Draw),
    ]


class Frame(ctypes.Structure):
    """What stands around the blocks of a causal language model."""

    _fields_: ClassVar[_Fields] = [
        ("pos_embed", c_void_p),
        *_each(c_int64, "pos_rows pos_offset"),
        *_each(c_float, "embed_scale logit_scale softcap"),
        ("pos_dtype", c_int32),
        *_each(Norm, "embed_norm final_norm"),
        *_each(Matrix, "embed project_in project_out head"),
    ]


class SketchCall(ctypes.Structure):
    """Arguments of `slipstream_sketch`."""

    _fields_: ClassVar[_Fields] = [
        *_each(Matrix, "head sketch"),
        *_each(c_void_p, "directions weights errors lengths"),
        *_each(c_int64, "first count"),
        *_each(c_float, "stretch along"),
    ]


class Screen(ctypes.Structure):
    """What bounds the scores of all tokens."""

    _fields_: ClassVar[_Fields] = [
        ("sketch", Matrix),
        *_each(c_void_p, "directions weights errors"),
        ("num_directions", c_int64),
        *_each(c_float, "stretch along norms"),
        ("unused", c_int32),
    ]


class ModelCall(ctypes.Structure):
    """Arguments of `slipstream_model`."""

    _fields_: ClassVar[_Fields] = [
        ("stack", StackCall),
        ("frame", POINTER(Frame)),
        *_each(c_void_p, "token_ids positions logit_rows logits best"),
        ("draw", POINTER(Draw)),
        *_each(c_int64, "rows steps"),
        ("ends", c_void_p),
        ("num_ends", c_int64),
        *_each(c_void_p, "done told"),
        ("screen", POINTER(Screen)),
        ("entered", c_void_p),
        ("num_entered", c_int64),
        *_each(c_void_p, "looked suppressed"),
        ("num_suppressed", c_int64),
    ]


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's memory begins, or null for None."""
    return None if tensor is None else tensor.data_ptr()
