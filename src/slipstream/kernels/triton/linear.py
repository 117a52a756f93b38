"""`linear` on the GPU, for every weight format: Triton kernels for one row and for some, torch for many.

Many rows are bound by the matrix units, which torch's product keeps busy; packed weights are unpacked for it
in one pass.

Shapes: T packed tokens (rows of x), I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.triton.decode import kind_of
from slipstream.kernels.triton.fp8_rows import times_rounded
from slipstream.kernels.triton.matmul import times_matrix
from slipstream.kernels.triton.one_row import WIDEST_ROW, times_row
from slipstream.kernels.triton.operands import Around, Matrix
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.target import refuse
from slipstream.kernels.triton.unpack import unpacked
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight, linear

__all__ = ["KERNELS", "MOST_ROWS", "matrix_of", "run_linear", "takes_norm", "times"]

MOST_ROWS = 128
"""Maximum number of rows for these kernels; for more, packed weights are unpacked and torch multiplies."""

_ONE = 1
"""The maximum for dense weights: from two rows on, torch's product reads them at memory bandwidth."""


def matrix_of(weight: Weight) -> Matrix | str:
    """Return a weight as the kernels take it, or why they cannot read it."""
    known = kind_of(weight.format)
    if known is None:
        return f"the weight format {weight.format!r} is not supported"
    if weight.format == "plain" and (len(weight.planes) > 1 or weight.planes[0].stride(-1) != 1):
        return "its rows are in several tensors, or are not contiguous"
    bias, outputs = weight.bias, weight.shape[-2]
    if bias is not None and bias.shape[-1] != outputs:  # torch would broadcast a single number
        return f"a bias of shape {tuple(bias.shape)} with {outputs} outputs is not supported"
    return Matrix(list(weight.planes), weight.bias, *known, weight.shape[-2])


def takes_norm(x: Tensor) -> bool:
    """Whether the kernel for these rows also applies the norm before: for one row, if it is not too wide."""
    return x.shape[0] == 1 and x.shape[1] <= WIDEST_ROW


def times(x: Tensor, matrix: Matrix, around: Around) -> Tensor:
    """Multiply up to `MOST_ROWS` rows by a matrix `(O, I)`, including what precedes and follows the matrix.

    Where `takes_norm` is false, a norm must have been applied already.
    """
    x = x.contiguous()
    return times_row(x, matrix, around) if takes_norm(x) else times_matrix(x, matrix, around)


def _launch(
    x: Tensor, planes: list[Tensor], bias: Tensor | None, kind: int, blocks: int, outputs: int
) -> Tensor:
    return times(x, Matrix(planes, bias, kind, blocks, outputs), Around())


_linear = operator(
    "linear(Tensor x, Tensor[] planes, Tensor? bias, int kind, int blocks, int outputs) -> Tensor",
    _launch,
    lambda x, planes, bias, kind, blocks, outputs: x.new_empty(x.shape[0], outputs),
)


def run_linear(x: Tensor, weight: Weight) -> Tensor:
    """Compute `ops.linear`."""
    matrix = matrix_of(weight)
    if x.dim() != 2 or not x.shape[0] or isinstance(matrix, str):
        return linear(x, weight)
    if x.shape[0] <= (_ONE if weight.format == "plain" else MOST_ROWS):
        return _linear(  # type: ignore[no-any-return]
            x, matrix.planes, matrix.bias, matrix.kind, matrix.blocks, matrix.outputs
        )
    if weight.format == "plain":
        return linear(x, weight)
    if weight.rounding is not None:
        return times_rounded(x, matrix, weight.rounding)
    return F.linear(x, unpacked(matrix, x.shape[1], x.dtype), weight.bias)


def _refuse(facts: Facts) -> str | None:
    if kind_of(facts.format) is None:
        return f"does not read the weight format {facts.format!r}"
    return refuse(facts, dtypes=(torch.float32, torch.bfloat16, torch.float16))


KERNELS = (Kernel("linear", "triton", "cuda", _refuse, run_linear),)
