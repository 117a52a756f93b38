"""`linear` of dense weights on the CPU: rows times a matrix that is read once, where torch reads it slower.

Shapes: T packed tokens, I input width, O output width.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.cpu.abi import DTYPES, LinearCall, Matrix, Run, address
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight

__all__ = ["KERNELS", "matrix_of", "native_linear"]

_MOST_ROWS = {torch.float32: 64, torch.bfloat16: 16, torch.float16: 1 << 20}
"""Rows up to which torch's own product is slower: measured without AMX; in float16 it is 20 times as slow."""

_LEAST_BYTES = 1 << 16
"""Below this a call costs more than it saves."""


def matrix_of(weight: Weight) -> Matrix | str:
    """Describe a dense weight to the library, or say why it cannot be.

    The tensors must be kept alive, and where the struct is copied also its `memory`.
    """
    if weight.format != "plain":
        return f"no native kernel reads the weight format {weight.format!r}"
    dtype, bias = weight.planes[0].dtype, weight.bias
    if bias is not None and (bias.dtype not in DTYPES or not bias.is_contiguous()):
        return f"a bias in {bias.dtype} is not read"
    runs = []
    for plane in weight.planes:
        if plane.dim() != 2 or plane.dtype != dtype or dtype not in DTYPES or plane.device.type != "cpu":
            return f"a matrix of {plane.dim()} dimensions in {plane.dtype} on {plane.device} is not read"
        (rows, inputs), (down, across) = plane.shape, plane.stride()
        transposed = across != 1 and inputs > 1
        if transposed and down != 1 and rows > 1:
            return f"a matrix with strides {plane.stride()} is not read"
        # A single row or column may have any stride.
        stride = max(across, rows) if transposed else max(down, inputs)
        runs.append(Run(data=address(plane), rows=rows, stride=stride, transposed=int(transposed)))
    memory = (Run * len(runs))(*runs)
    matrix = Matrix(
        runs=ctypes.addressof(memory),
        bias=address(bias),
        num_runs=len(runs),
        outputs=weight.shape[0],
        inputs=weight.shape[1],
        dtype=DTYPES[dtype],
        bias_dtype=0 if bias is None else DTYPES[bias.dtype],
    )
    matrix.memory = memory
    return matrix


def native_linear(x: Tensor, weight: Weight, library: Library) -> Tensor:
    """Return `x @ dense(weight).T + bias`, always by the library.

    Args:
        x: `(T, I)` in float32, bfloat16 or float16.
        weight: Dense, `(O, I)`, of any of these dtypes.
        library: For one instruction set.

    Returns:
        `(T, O)` in the dtype of `x`.

    Raises:
        ValueError: The weight is none that the library reads, or does not fit `x`.
    """
    matrix = matrix_of(weight)
    if isinstance(matrix, str):
        raise ValueError(matrix)
    if x.dim() != 2 or x.shape[1] != matrix.inputs or x.dtype not in DTYPES:
        raise ValueError(f"x of shape {tuple(x.shape)} in {x.dtype} does not fit {weight.shape}")
    x = x.contiguous()
    out = torch.empty(x.shape[0], matrix.outputs, dtype=x.dtype)
    if out.numel():
        call = LinearCall(
            x=address(x), out=address(out), rows=x.shape[0], dtype=DTYPES[x.dtype], weight=matrix
        )
        library.run("linear", call)
    return out


def _refuse(facts: Facts, *, isa: str) -> str | None:
    if facts.dtype not in DTYPES:
        return f"computes in float32, bfloat16 and float16, not {facts.dtype}"
    if facts.format != "plain":
        return f"reads dense weights, not {facts.format}"
    return refuse(isa)


def _run(x: Tensor, weight: Weight, *, isa: str) -> Tensor:
    if (
        weight.format == "plain"
        and x.dim() == 2
        and 0 < x.shape[0] <= _MOST_ROWS.get(x.dtype, 0)
        and weight.planes[0].dtype == x.dtype
        and weight.nbytes >= _LEAST_BYTES
        and not isinstance(matrix_of(weight), str)
        and (library := load(isa)) is not None
    ):
        return native_linear(x, weight, library)
    return F.linear(x, weight.dense(), weight.bias)


def _kernel(isa: str) -> Kernel:
    decide: Callable[[Facts], str | None] = functools.partial(_refuse, isa=isa)
    return Kernel("linear", f"cpu-{isa}", "cpu", decide, functools.partial(_run, isa=isa))


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)
