"""Repairs of Triton's interpreter, which computes in bfloat16 and 8-bit floats silently wrong.

The interpreter keeps bfloat16 as raw 16-bit integers: sums, products, comparisons and `tl.dot` of them work
on the bit patterns, and casts to bfloat16 or an 8-bit float cut off instead of rounding to nearest even. Up
to 3.6 it also cannot loop to a bound that is only known at run time. `test_repair.py` proves each repair.
What is left is `tl.sum` of a bfloat16 block, which kernels therefore widen right after loading.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["repair"]

_Builder: Any = interpreter.InterpreterBuilder
_Handle: Any = interpreter.TensorHandle
_EIGHT_BITS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_LARGEST_E4M3 = 448.0

_ARITHMETIC = [
    "fadd",
    "fsub",
    "fmul",
    "fdiv",
    "frem",
    "fma",
    "fneg",
    "clampf",
    "precise_divf",
    "minimumf",
    "minnumf",
    "maximumf",
    "maxnumf",
    "fcmpOLT",
    "fcmpOGT",
    "fcmpOLE",
    "fcmpOGE",
    "fcmpOEQ",
    "fcmpONE",
    "fcmpULT",
    "fcmpUGT",
    "fcmpULE",
    "fcmpUGE",
    "fcmpUEQ",
    "fcmpUNE",
    "cos",
    "sin",
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "precise_sqrt",
    "floor",
    "ceil",
    "erf",
]


def _from_bf16(bits: Any) -> Any:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: Any) -> Any:
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _widened(handle: Any) -> Any:
    """A bfloat16 block as float32; others, and what is no block, as they are."""
    if isinstance(handle, _Handle) and handle.dtype.scalar == tl.bfloat16:
        return _Handle(_from_bf16(handle.data), tl.float32)
    return handle


def _values(handle: Any) -> Any:
    kind = handle.dtype.scalar
    if kind in _EIGHT_BITS:
        codes = torch.from_numpy(np.ascontiguousarray(handle.data))
        return codes.view(_EIGHT_BITS[kind]).float().numpy()
    return _widened(handle).data


def _cast(self: Any, source: Any, target: Any, *, otherwise: Any) -> Any:
    before, after = source.dtype.scalar, target.scalar
    special = {tl.bfloat16, *_EIGHT_BITS}
    if before == after or not special & {before, after}:
        return otherwise(self, source, target)
    values = _values(source)
    if after == tl.bfloat16:
        return _Handle(_to_bf16(values), after)
    if after in _EIGHT_BITS:
        floats = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        if after == tl.float8e4nv:  # the GPU saturates, torch makes NaN of what is too large
            floats = torch.where(floats.isnan(), floats, floats.clamp(-_LARGEST_E4M3, _LARGEST_E4M3))
        return _Handle(floats.to(_EIGHT_BITS[after]).view(torch.uint8).numpy(), after)
    return _Handle(values.astype(interpreter._get_np_dtype(target)), after)


def _in_float32(run: Any) -> Any:
    """An operation of the builder that widens bfloat16 and rounds what it makes of it."""

    @functools.wraps(run)
    def wider(self: Any, *operands: Any) -> Any:
        if all(_widened(operand) is operand for operand in operands):
            return run(self, *operands)
        result = run(self, *(_widened(operand) for operand in operands))
        if result.data.dtype == np.float32:
            return _Handle(_to_bf16(result.data), tl.bfloat16)
        return result

    return wider


@functools.cache
def repair() -> None:
    """Repair the interpreter of this process, once."""
    _Builder.cast_impl = functools.partialmethod(_cast, otherwise=_Builder.cast_impl)
    _Builder.create_fp_to_fp = lambda self, source, target, rounding: self.cast_impl(source, target)
    dot = _Builder.create_dot
    _Builder.create_dot = lambda self, a, b, *rest: dot(self, _widened(a), _widened(b), *rest)
    for name in _ARITHMETIC:
        if run := getattr(_Builder, f"create_{name}", None):
            setattr(_Builder, f"create_{name}", _in_float32(run))
    if not hasattr(_Builder, "get_bf16"):
        _Builder.get_bf16 = lambda self, value: _Handle(_to_bf16(np.array([value])), tl.bfloat16)
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 6):
        _let_tensors_be_bounds()


def _let_tensors_be_bounds() -> None:
    """`range(0, n)` with an `n` handed over: numpy 2.4 makes no index of an array of one element."""
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        index = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])  # noqa: E731
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = with_index
