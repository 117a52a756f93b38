"""The C structs of `native/abi_model.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

from slipstream.kernels.cpu.abi import Fields, Matrix, Norm, StackCall, each

__all__ = ["Draw", "DrawCall", "Frame", "ModelCall", "Screen", "SketchCall"]


class Draw(ctypes.Structure):
    """How tokens are sampled or penalised."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "numbers noise generator places seen"),
        ("rows", c_int64),
        ("penalty", c_float),
        ("best", c_int32),
    ]


class DrawCall(ctypes.Structure):
    """Arguments of `slipstream_draw`."""

    _fields_: ClassVar[Fields] = [
        *each(c_void_p, "scores out"),
        *each(c_int64, "rows vocabulary"),
        *each(c_int32, "dtype unused"),
        ("draw", Draw),
    ]


class Frame(ctypes.Structure):
    """What surrounds the blocks of a causal language model: embedding, positions, final norm, head."""

    _fields_: ClassVar[Fields] = [
        ("pos_embed", c_void_p),
        *each(c_int64, "pos_rows pos_offset pos_padding"),
        ("placeholders", c_void_p),
        *each(c_int64, "num_placeholders stand_in"),
        *each(c_float, "embed_scale logit_scale softcap"),
        *each(c_int32, "pos_dtype pos_after_norm"),
        *each(c_float, "inputs_embed_scale inputs_project_scale inputs_scale"),
        *each(Norm, "embed_norm final_norm inputs_norm"),
        *each(Matrix, "embed project_in project_out head inputs_embed inputs_project"),
        ("inputs_rows", c_int64),
        *each(c_void_p, "split join"),
        *each(c_int64, "others embed_end"),
        ("out_norm", Norm),
        ("type_row", c_void_p),
        *each(c_int32, "type_dtype out_activation"),
    ]


class SketchCall(ctypes.Structure):
    """Arguments of `slipstream_sketch`."""

    _fields_: ClassVar[Fields] = [
        *each(Matrix, "head sketch"),
        *each(c_void_p, "directions weights errors lengths"),
        *each(c_int64, "first count"),
        *each(c_float, "stretch along"),
    ]


class Screen(ctypes.Structure):
    """A sketch of the vocabulary projection, with what bounds the scores of all tokens."""

    _fields_: ClassVar[Fields] = [
        ("sketch", Matrix),
        *each(c_void_p, "directions weights errors"),
        ("num_directions", c_int64),
        *each(c_float, "stretch along norms"),
        ("unused", c_int32),
    ]


class ModelCall(ctypes.Structure):
    """Arguments of `slipstream_model`."""

    _fields_: ClassVar[Fields] = [
        ("stack", StackCall),
        ("frame", POINTER(Frame)),
        *each(c_void_p, "token_ids positions logit_rows logits best"),
        ("draw", POINTER(Draw)),
        *each(c_int64, "rows steps"),
        ("ends", c_void_p),
        ("num_ends", c_int64),
        *each(c_void_p, "done told"),
        ("screen", POINTER(Screen)),
        ("entered", c_void_p),
        ("num_entered", c_int64),
        *each(c_void_p, "looked suppressed"),
        ("num_suppressed", c_int64),
    ]
