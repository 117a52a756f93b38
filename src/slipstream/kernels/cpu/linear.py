"""`linear` on the CPU: products that read a matrix once, as it is stored, where torch is slower.

Shapes: T packed tokens, I input width, O output width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.cpu.abi import DTYPES, FORMATS, LinearCall, Matrix, address
from slipstream.kernels.cpu.library import ISAS, LONG, Library, load, refuse, rest_torch, threads_of_torch
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight, linear

__all__ = ["KERNELS", "native_linear", "refuse_linear", "run_linear", "threads_for"]

_MOST_ROWS = 1 << 20
"""Rows up to which torch's product is slower: no limit was found with 1 to 512 rows of 576 to 5632."""

_MOST_ROWS_FLOAT32 = 47
"""The limit for a dense matrix in float32 with AVX-512: from 64 rows on both take the same time (0.9 to 1.1
with 196 to 12544 rows of 96 to 384, two cores of a Zen 5), but between torch's operations the library's
threads compete with torch's idle ones, or run alone: a Swin-T of 72 ms took 100 ms."""

_MOST_ROWS_BFLOAT16 = 47
"""The limit for a dense matrix in bfloat16: from 64 rows on torch takes 0.5 to 1.0 of the time. Measured with
64 to 8192 rows of 320 to 5120, two cores of a Zen 5, runs of both interleaved. With 48 rows the library
begins to multiply by panels, as torch does, and its threads compete with torch's idle ones: with products of
49 rows in the library, a Swin-T takes 64 ms, otherwise 60."""

_MOST_ROWS_BESIDE_AMX = 16
"""The limit in bfloat16 where torch's products use AMX and the library's unit does not."""

_WIDE = ("amx", "avx512bf16", "avx512")
"""Instruction sets with AVX-512."""

_LEAST_BYTES = 1 << 16
"""Minimum size of a dense matrix: below it a call costs more than it saves. Packed matrices have no minimum,
since torch would unpack them first: 8 us against 13 to 180 us for a matrix of 16 x 16."""

_READS_EITHER = ("baseline",)
"""Instruction sets that read a transposed matrix as fast as one stored by rows. With the others, storage by
rows takes 0.6 to 0.9 of the time (1 to 4 tokens times 3072 x 768, in each dtype), and 0.5 to 1.05 with more
tokens."""

_MEMORY, _RATES = 15e9, {torch.float32: 8e10, torch.bfloat16: 2.5e11}
"""Rough throughput of one thread: bytes per second, and operations per second by dtype."""

_WAKE = 5e-4
"""Seconds that further threads must save. The library's threads sleep after 20 us, and torch's spin on their
cores for milliseconds after an operation: a decoder of 10 layers of 576 that runs its own code between
products takes 14.8 ms a token in float32 with two threads in each product, and 8.1 ms with one in the small
ones."""


def native_linear(x: Tensor, weight: Weight, library: Library) -> Tensor:
    """Compute `ops.linear.linear`, always with the library.

    Args:
        x: `(T, I)` in float32, bfloat16 or float16.
        weight: `(O, I)`, dense in any of these dtypes or packed.
        library: For one instruction set.

    Returns:
        `(T, O)` in the dtype of `x`.

    Raises:
        ValueError: The library cannot read the weight, or it does not fit `x`.
    """
    matrix = matrix_of(weight)
    if isinstance(matrix, str):
        raise ValueError(matrix)
    if x.dim() != 2 or x.shape[1] != matrix.inputs or x.dtype not in DTYPES:
        raise ValueError(f"x of shape {tuple(x.shape)} in {x.dtype} does not fit {weight.shape}")
    return _product(x.contiguous(), matrix, library, None)


def _product(x: Tensor, matrix: Matrix, library: Library, threads: int | None) -> Tensor:
    out = torch.empty(x.shape[0], matrix.outputs, dtype=x.dtype, device="cpu")
    if out.numel():
        if 2 * out.numel() * matrix.inputs >= LONG:
            rest_torch()
        call = LinearCall(
            x=address(x), out=address(out), rows=x.shape[0], dtype=DTYPES[x.dtype], weight=matrix
        )
        library.run("linear", call, threads)
    return out


def threads_for(x: Tensor, *weights: Weight) -> int | None:
    """Return 1 if further threads would save less than it takes to wake them, else None for all threads.

    Args:
        x: `(T, I)`, the rows that are multiplied.
        weights: The matrices, multiplied one after the other.
    """
    rate = _RATES.get(x.dtype, _RATES[torch.float32])
    seconds = sum(
        max(weight.nbytes / _MEMORY, 2 * x.shape[0] * weight.shape[0] * weight.shape[1] / rate)
        for weight in weights
    )
    return 1 if seconds * (1 - 1 / threads_of_torch()) < _WAKE else None


def refuse_linear(facts: Facts, *, isa: str) -> str | None:
    """Return why the library does not multiply in this dtype and format, or None if it does."""
    if facts.dtype not in DTYPES:
        return f"computes in float32, bfloat16 and float16, not {facts.dtype}"
    if facts.format not in FORMATS:
        return f"does not read the weight format {facts.format!r}"
    return refuse(isa)


def run_linear(x: Tensor, weight: Weight, *, isa: str) -> Tensor:
    """Compute `ops.linear.linear`, with the library where that is faster."""
    packed = weight.format != "plain"
    most_rows = _MOST_ROWS
    if x.dtype == torch.bfloat16 and isa != "amx" and weight.rounding is None:
        if torch.cpu._is_amx_tile_supported():
            most_rows = _MOST_ROWS_BESIDE_AMX
        elif not packed and torch.cpu._is_avx512_bf16_supported():
            most_rows = _MOST_ROWS_BFLOAT16
    elif x.dtype == torch.float32 and isa in _WIDE and not packed:
        most_rows = _MOST_ROWS_FLOAT32
    if (
        x.dim() == 2
        and x.dtype in DTYPES
        and 0 < x.shape[0] <= most_rows
        and (packed or (weight.planes[0].dtype == x.dtype and weight.nbytes >= _LEAST_BYTES))
        and x.shape[1] == weight.shape[-1]
        and not isinstance(matrix := matrix_of(weight), str)
        and (library := load(isa)) is not None
    ):
        return _product(x.contiguous(), matrix, library, threads_for(x, weight))
    return linear(x, weight)


def _kernel(isa: str) -> Kernel:
    decide: Callable[[Facts], str | None] = functools.partial(refuse_linear, isa=isa)
    run = functools.partial(run_linear, isa=isa)
    return Kernel("linear", f"cpu-{isa}", "cpu", decide, run, by_rows=isa not in _READS_EITHER)


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)
