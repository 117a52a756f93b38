"""The C structs of `native/abi_block.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

from slipstream.kernels.cpu.abi_types import Fields, Matrix, Norm, Scale, each

__all__ = [
    "Across",
    "Block",
    "Inputs",
    "Latent",
    "Mask",
    "Moe",
    "Multipliers",
    "Part",
    "Recurrence",
    "Streams",
]


class Mask(ctypes.Structure):
    """What, besides causality, decides which keys are attended to and how much."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "alibi sinks"),
        *each(c_float, "scale softcap"),
        *each(c_int32, "window sinks_dtype"),
        ("relative", c_void_p),
        *each(c_int64, "reach zero chunk"),
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
        *each(Matrix, "mixed steps"),
        *each(Norm, "step_norm key_norm query_norm"),
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


class Streams(ctypes.Structure):
    """Several streams of states per token, of which one runs through the block."""

    _fields_: ClassVar[Fields] = [
        *each(c_int64, "count active rank"),
        *each(Norm, "router_norm narrow_norm"),
        *each(Matrix, "router predict correct narrow_in narrow_out"),
        ("scale", Scale),
    ]


class Block(ctypes.Structure):
    """One transformer block."""

    _fields_: ClassVar[Fields] = [
        *each(c_int64, "hidden heads kv_heads head_dim ffn"),
        *each(c_int32, "post parallel residual_from_norm gated"),
        *each(c_int32, "activation qk_norm qk_norm_after_rope table rope_interleaved"),
        *each(c_float, "residual_scale clip growth growth_period growth_offset"),
        *each(c_int32, "causal gate gates_heads branches keys_values beside"),
        ("cutoff", c_float),
        ("sparse", c_int32),
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
        ("streams", POINTER(Streams)),
    ]
