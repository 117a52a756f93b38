"""Describes a weight, dense or packed, to the library without copying anything.

Shapes: I input width, O output width.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu.abi import (
    CODES,
    DTYPES,
    FACTORS,
    FORMATS,
    MINIMA,
    SCALES,
    UPPER,
    Matrix,
    Run,
    address,
)
from slipstream.ops.linear import Weight

__all__ = ["kept_matrix", "matrix_of"]

_BF13_BLOCK = 64
"""Inputs per block in the planes of bf13."""

_MOST_ROUNDED = 1 << 16
"""Maximum number of inputs whose products of bytes can be summed in 32 bits."""


def matrix_of(weight: Weight, expert: int | None = None) -> Matrix | str:
    """Describe a weight to the library, or return why that is not possible.

    The caller must keep the tensors alive, and also the struct's `memory` if the struct is copied.

    Args:
        weight: `(O, I)`, or `(experts, O, I)` together with `expert`.
        expert: Index of the expert whose matrix is described.
    """
    planes, bias, shape = weight.planes, weight.bias, weight.shape
    if expert is not None:
        planes, shape = tuple(plane[expert] for plane in planes), shape[1:]
        bias = None if bias is None else bias[expert]
    dtype = planes[0].dtype if weight.dtype is None else weight.dtype
    if weight.format not in FORMATS:
        return f"no native kernel supports the weight format {weight.format!r}"
    if len(shape) != 2 or dtype not in DTYPES:
        return f"a matrix of {len(shape)} dimensions in {dtype} is not supported"
    if bias is not None and (bias.dtype not in DTYPES or not bias.is_contiguous()):
        return f"a bias in {bias.dtype} is not supported"
    if bias is not None and bias.shape != shape[:1]:  # torch would broadcast a single number
        return f"a bias of shape {tuple(bias.shape)} with {shape[0]} outputs is not supported"
    matrix = Matrix(
        bias=address(bias),
        outputs=shape[0],
        inputs=shape[1],
        dtype=DTYPES[dtype],
        bias_dtype=0 if bias is None else DTYPES[bias.dtype],
        format=FORMATS[weight.format],
    )
    if weight.rounding is not None:
        if shape[1] > _MOST_ROUNDED:
            return f"rows of {shape[1]} inputs are not quantized: sums of more than {_MOST_ROUNDED} overflow"
        matrix.input_bits, matrix.input_zero = 8, int(not weight.rounding.symmetric)
    reason = _dense(matrix, planes) if weight.format == "plain" else _packed(matrix, planes)
    return reason or matrix


def _dense(matrix: Matrix, planes: tuple[Tensor, ...]) -> str | None:
    """Fill in the runs of rows; return why that is not possible, or None."""
    runs = []
    for plane in planes:
        if plane.dim() != 2 or plane.dtype != planes[0].dtype or plane.device.type != "cpu":
            return f"a matrix of {plane.dim()} dimensions in {plane.dtype} on {plane.device} is not supported"
        (rows, inputs), (row_stride, column_stride) = plane.shape, plane.stride()
        transposed = column_stride != 1 and inputs > 1
        if transposed and row_stride != 1 and rows > 1:
            return f"a matrix with strides {plane.stride()} is not supported"
        stride, length = (column_stride, rows) if transposed else (row_stride, inputs)
        if stride < length and (inputs if transposed else rows) > 1:
            return f"a matrix whose rows overlap (strides {plane.stride()}) is not supported"
        stride = max(stride, length)  # a single row or column may have any stride
        runs.append(Run(data=address(plane), rows=rows, stride=stride, transposed=int(transposed)))
    matrix.memory = (Run * len(runs))(*runs)
    matrix.runs, matrix.num_runs = ctypes.addressof(matrix.memory), len(runs)
    return None


def _packed(matrix: Matrix, planes: tuple[Tensor, ...]) -> str | None:
    """Fill in the planes, whose sizes the library checks; return why that is not possible, or None."""
    matrix.memory = (Run * 0)()
    *others, factors = planes
    if factors.dtype != torch.float32:
        return f"row multipliers in {factors.dtype} are not supported"
    has_upper = len(others) > 1 and others[1].dtype == torch.uint8
    places = (CODES, UPPER, SCALES) if has_upper else (CODES, SCALES, MINIMA)[: len(others)]
    if matrix.format == FORMATS["bf13"]:
        matrix.group = _BF13_BLOCK
    elif SCALES in places:
        matrix.group = 2 * others[0].shape[-1] // others[places.index(SCALES)].shape[-1]
    for place, plane in (*zip(places, others, strict=True), (FACTORS, factors)):
        if plane.device.type != "cpu" or not plane.is_contiguous():
            return f"a plane with strides {plane.stride()} on {plane.device} is not supported"
        matrix.planes[place] = address(plane)
        matrix.plane_bytes[place] = plane.nbytes
    return None


def kept_matrix(weight: Weight, memory: list[Any], expert: int | None = None) -> Matrix:
    """Describe a matrix that `matrix_of` accepts, and keep what the struct points to.

    Args:
        weight: The matrix; its tensors must be kept alive.
        memory: Receives the objects, other than tensors, that the struct points to.
        expert: Index of the expert, for the matrices of several experts.
    """
    matrix = matrix_of(weight, expert)
    if isinstance(matrix, str):
        raise AssertionError(f"a matrix is described only once it was accepted: {matrix}")
    memory.append(matrix.memory)
    return matrix
