"""Shared by the packed formats: chunks of rows, a scale per row, bit fields in lanes of sixteen.

Shapes: O rows of a matrix, I inputs, R rows of one chunk, P inputs padded to the format's multiple.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "byte_columns",
    "chunks",
    "crumbs",
    "fit_rows",
    "from_crumbs",
    "from_nibbles",
    "group_columns",
    "inverse",
    "nibbles",
    "read_chunk",
    "row_multiplier",
    "unpack_rows",
]

_CHUNK = {"cpu": 1 << 17}
"""Weights per chunk: on a CPU the chunk and its temporaries stay in the L2 cache (3x as fast)."""
_CHUNK_ELSEWHERE = 1 << 24
_LEAST = 2.0**-100
"""Rows whose magnitudes are all below this are packed as zeros: their scales would be subnormal."""
_LANES = 16
_LOW, _STEP, _MOST_STEPS = -10, 24, 5
"""Rows are scaled to magnitudes in [2^-10, 2^14) by up to five steps of 2^24; any normal number can be."""


def chunks(tensor: Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices that cut `(..., O, I)` into chunks `(R, I)`, and its planes `(..., O, n)` likewise."""
    *lead, rows, width = tensor.shape
    step = max(1, _CHUNK.get(tensor.device.type, _CHUNK_ELSEWHERE) // max(1, width))
    for place in itertools.product(*(range(count) for count in lead)):
        for start in range(0, rows, step):
            yield (*place, slice(start, start + step))


def read_chunk(dense: Tensor, index: tuple[int | slice, ...]) -> Tensor:
    """Return a chunk as a contiguous float32 matrix `(R, I)`, which may share the tensor's memory."""
    return dense[index].float().contiguous()


def inverse(scale: Tensor) -> Tensor:
    """Return `1 / scale`, and 0 where `scale` is 0."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def row_multiplier(x: Tensor) -> Tensor:
    """Return multipliers that, divided out, bring rows into the range of float16, the dtype of scales.

    Args:
        x: `(R, I)` float32.

    Returns:
        `(R,)` float32: 1 if the row's largest magnitude lies in [2^-10, 2^14), as that of trained weights
        does, and for a row of zeros; otherwise the power of 2^24 that brings it there when divided out.
    """
    largest = x.abs().amax(dim=-1)
    _, exponent = torch.frexp(largest)  # the magnitude is in [2^(exponent - 1), 2^exponent)
    steps = torch.div(exponent - 1 - _LOW, _STEP, rounding_mode="floor").clamp_(-_MOST_STEPS, _MOST_STEPS)
    return torch.ldexp(torch.ones_like(largest), torch.where(largest == 0, 0, steps * _STEP))


def fit_rows(x: Tensor, targets: Sequence[float], rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Choose the scale of each row that minimises the squared error of the whole row.

    The scale's mantissa is rounded to 16 bits, so that a code times the scale is exact in float32 and packing
    unpacked weights finds the same scale again (or, for a row of a single magnitude, another one for the same
    numbers).

    Args:
        x: `(R, I)` float32.
        targets: Values that the row's largest magnitude may be scaled to, before rounding.
        rounded: Rounds scaled weights to representable values; may overwrite its argument, a fresh tensor.

    Returns:
        `(R,)` float32; 0 for a row of zeros.
    """
    largest = x.abs().amax(dim=-1)
    largest = torch.where(largest < _LEAST, 0.0, largest)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(max=126))
    x, largest = x * (1 / unit)[:, None], largest / unit  # squares of these are within range
    best = torch.zeros_like(largest)
    least = torch.full_like(largest, torch.inf, dtype=torch.float64)
    for target in targets:
        scale = _sixteen_bits(largest / target)
        values = rounded(x * inverse(scale)[:, None])
        error = _sum_of_squares(values.mul_(scale[:, None]).sub_(x))
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best * unit


def _sum_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of each row, in float64 so that the order does not matter; `x` is overwritten."""
    return x.square_().sum(dim=-1, dtype=torch.float64)


def _sixteen_bits(scale: Tensor) -> Tensor:
    """Round the mantissas of positive float32 numbers to 16 bits."""
    return ((scale.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)


def byte_columns(planes: tuple[Tensor, ...], run: range) -> tuple[Tensor, ...]:
    """Return the planes of a run of inputs, for one-byte codes `(..., O, I)` and multipliers `(..., O)`."""
    codes, row = planes
    return codes[..., run.start : run.stop].contiguous(), row


def group_columns(planes: tuple[Tensor, ...], run: range, *, group: int) -> tuple[Tensor, ...]:
    """Return the planes of a run of inputs that starts at a group and ends at a group or at the row's end.

    Args:
        planes: Planes with any number of elements per group, the last of them with one (scales or minima),
            then the multipliers `(..., O)`.
        run: The inputs.
        group: Inputs per group.
    """
    *codes, row = planes
    groups = codes[-1].shape[-1]
    first, last = run.start // group, -(-run.stop // group)
    widths = [plane.shape[-1] // groups for plane in codes]
    cut = [
        plane[..., first * width : last * width].contiguous()
        for plane, width in zip(codes, widths, strict=True)
    ]
    return (*cut, row)


def unpack_rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    row: Tensor,
    values: Callable[[tuple[int | slice, ...]], Tensor],
) -> Tensor:
    """Fill a dense tensor chunk by chunk.

    Args:
        shape: `(..., O, I)`.
        dtype: Dtype of the result.
        row: `(..., O)` float32, the multiplier of each row.
        values: Returns the float32 values `(R, P)` of a chunk, before the multiplier.
    """
    dense = torch.empty(shape, dtype=dtype, device=row.device)
    for index in chunks(dense):
        part = values(index)[..., : shape[-1]] * row[index][:, None]
        dense[index] = _within(part, dtype)
    return dense


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp to the range of float16, so that rounding up does not turn its largest weights into infinity."""
    return values.clamp_(-65504.0, 65504.0) if dtype == torch.float16 else values


def nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes `(..., P)` uint8 to `(..., P / 2)`, 32 in 16 bytes: `code[j] | code[j+16] << 4`."""
    first, second = codes.unflatten(-1, (-1, 2, _LANES)).unbind(-2)
    packed: Tensor = first | second << 4
    return packed.flatten(-2)


def from_nibbles(packed: Tensor) -> Tensor:
    """Undo `nibbles`."""
    lanes = packed.unflatten(-1, (-1, _LANES))
    return torch.stack((lanes & 15, lanes >> 4), dim=-2).flatten(-3)


def crumbs(codes: Tensor) -> Tensor:
    """Pack 2-bit codes `(..., P)` uint8 to `(..., P / 4)`, 64 in 16 bytes: `code[j + 16 k] << 2 k`."""
    lanes = codes.unflatten(-1, (-1, 4, _LANES))
    first, second, third, fourth = lanes.unbind(-2)
    packed: Tensor = first | second << 2 | third << 4 | fourth << 6
    return packed.flatten(-2)


def from_crumbs(packed: Tensor) -> Tensor:
    """Undo `crumbs`."""
    lanes = packed.unflatten(-1, (-1, _LANES))
    return torch.stack([lanes >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)
