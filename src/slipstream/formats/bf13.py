"""bfloat16 stored losslessly in 13 bits: `w = row * code`, where a code is a bfloat16 without 3 of its bits.

The magnitudes of a row's weights span few powers of two. When the row's largest magnitude is scaled to [1, 2)
by a power of two, weights of at least 2^-29 have one of fifteen upper parts of the exponent, stored in four
bits:

bit        15 | 14 ... 8 | 7 | 6 ... 0
bfloat16    s | e7 .. e1 | e0 | mantissa
upper       s | (e7 .. e1) - 48, or 0 for zeros        5 bits, s at bit 4; e7 .. e1 is 49 to 63
lower                      e0 | mantissa               8 bits

A row is padded with zeros to P, a multiple of 64 inputs. Of each 64, input 32 h + 8 l + t is number
16 l + 8 h + t, so that a processor joins the bytes of all weights with two instructions. All bytes of 64
weights are contiguous, because reading several streams from memory is slower than reading one:

plane 0   byte j of 104, for 64 inputs                                    uint8 `(..., O, P / 8 * 13)`
           0 - 63    lower[j]
          64 - 95    u[j - 64] | u[j - 32] << 4, u = upper[2 .. 0] | s << 3
          96 - 103   bit b: the upper[3] of number 8 (j - 96) + b
plane 1   row[0] row[1] ...                            powers of two      float32 `(..., O)`

Packing first rounds to the nearest bfloat16. A bfloat16 weight is unpacked to the same value, unless it is
smaller than 2^-29 of its row's largest, as one in two hundred million normally distributed weights is: then
it becomes 0 or that 2^-29, whichever is nearer. Rows whose magnitudes are all below 2^-96 become zeros.

Source: the fields of bfloat16; Zhang et al. 2025 (arXiv 2504.11651) for how few exponents weights have.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.formats.rows import chunks, read_chunk, unpack_rows
from slipstream.formats.weight_format import Format

__all__ = ["BF13"]

_BLOCK, _BYTES = 64, 104
_ONE, _LEAST = 127, 98
"""Biased exponents of 1, and of the smallest nonzero number."""
_BELOW = 48
"""Subtracted from the upper part of an exponent to make its code."""
_SIGN = 0x8000


def _in_lanes(x: Tensor) -> Tensor:
    """Permute the inputs of `(R, P)` to the order in which their bytes are stored."""
    lanes: Tensor = x.unflatten(-1, (-1, 2, 4, 8)).transpose(-3, -2)
    return lanes.flatten(-4)


def _in_order(lanes: Tensor) -> Tensor:
    """Undo `_in_lanes`."""
    halves: Tensor = lanes.unflatten(-1, (-1, 4, 2, 8)).transpose(-3, -2)
    return halves.flatten(-4)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale rows by a power of two so that their largest magnitudes lie in [1, 2), and round to bfloat16.

    Args:
        x: `(R, I)` float32.

    Returns:
        The bits of the scaled bfloat16 numbers `(R, I)` as int32, and `(R,)`, the exponent of the power of
        two that each row was divided by.
    """
    bits = x.to(torch.bfloat16).view(torch.int16).int()
    exponents = bits >> 7 & 0xFF
    largest = exponents.amax(dim=-1)
    zeros = largest < _ONE - _LEAST + 2  # or so small that others of the row might be no normal numbers
    shift = torch.where(zeros, 0, largest - _ONE)
    exponents, shifts = exponents - shift[:, None], (shift << 7)[:, None]
    nearest = torch.where(exponents == _LEAST - 1, _LEAST << 7, 0)
    magnitudes = torch.where(exponents >= _LEAST, (bits & 0x7FFF) - shifts, nearest)
    return torch.where(zeros[:, None], 0, magnitudes) | bits & _SIGN, shift


def _pack(dense: Tensor) -> tuple[Tensor, ...]:
    codes, row = (
        torch.empty(shape, dtype=dtype, device=dense.device)
        for shape, dtype in BF13.layout(tuple(dense.shape))
    )
    padded = codes.shape[-1] // _BYTES * _BLOCK
    for index in chunks(dense):
        bits, shift = _normal(read_chunk(dense, index))
        bits = _in_lanes(F.pad(bits, (0, padded - bits.shape[-1])))
        upper = ((bits >> 8 & 0x7F) - _BELOW).clamp_(min=0)
        first, second = (upper & 7 | bits >> 12 & 8).unflatten(-1, (-1, 2, _BLOCK // 2)).unbind(-2)
        places = torch.arange(8, dtype=torch.int32, device=dense.device)
        ones = ((upper >> 3).unflatten(-1, (-1, 8, 8)) << places).sum(dim=-1)
        lower = (bits & 0xFF).unflatten(-1, (-1, _BLOCK))
        codes[index] = torch.cat((lower, first | second << 4, ones), dim=-1).flatten(-2).to(torch.uint8)
        row[index] = torch.ldexp(torch.ones_like(shift, dtype=torch.float32), shift)
    return codes, row


def _unpack(planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    codes, row = planes
    places = torch.arange(8, dtype=torch.int32, device=codes.device)

    def values(index: tuple[int | slice, ...]) -> Tensor:
        blocks = codes[index].int().unflatten(-1, (-1, _BYTES))
        lower, both, ones = blocks.split((_BLOCK, _BLOCK // 2, _BLOCK // 8), dim=-1)
        four = torch.cat((both & 15, both >> 4), dim=-1)
        one = (ones[..., None] >> places & 1).flatten(-2)
        upper = four & 7 | one << 3
        high = torch.where(upper == 0, 0, upper + _BELOW) | (four & 8) << 4
        return (_in_order((high << 8 | lower).flatten(-2)) << 16).view(torch.float32)

    return unpack_rows(shape, dtype, row, values)


def _columns(planes: tuple[Tensor, ...], run: range) -> tuple[Tensor, ...]:
    """Return the planes of a run of inputs that starts at a block and ends at a block or at the row's end."""
    codes, row = planes
    first, last = run.start // _BLOCK, -(-run.stop // _BLOCK)
    return codes[..., first * _BYTES : last * _BYTES].contiguous(), row


BF13 = Format(
    "bf13",
    bits=13.0,
    error=2.0**-8,
    pack=_pack,
    unpack=_unpack,
    group=_BLOCK,
    multiple=_BLOCK,
    floor=2.0**-30,
    planes=((torch.uint8, Fraction(_BLOCK, _BYTES)),),
    columns=_columns,
)
