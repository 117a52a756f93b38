"""8-bit floats (e4m3) with one scale per row: `w = row * code`.

bit       7    6 5 4 3    2 1 0
code      s | e e e e | m m m     (-1)^s * 2^(e - 7) * (1 + m / 8), or 2^-6 * m / 8 where e = 0; at most 448

plane 0   code[0,0] code[0,1] ... code[0,I-1] | code[1,0] ...   uint8 `(..., O, I)`, bits of `float8_e4m3fn`
plane 1   row[0] row[1] ...                                     float32 `(..., O)`

Nothing is padded. The row's largest magnitude is scaled to 448, 384, 320 or 256, whichever minimises the
squared error of the row: where the bulk of the numbers lies between two powers of two decides how finely it
is rounded. No weight is off by more than 1/16 of its own magnitude (or 2^-10 of the row's scale), nor by more
than 1/20 of the largest magnitude, plus 2^-11 of itself for rounding through float16.

Source: Micikevicius et al. 2022 (arXiv 2209.05433), table 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.formats.minifloat import MiniFloat
from slipstream.formats.rows import byte_columns, chunks, fit_rows, inverse, read_chunk, unpack_rows
from slipstream.formats.weight_format import Format

__all__ = ["FP8"]

_E4M3 = MiniFloat(exponent=4, mantissa=3, largest=448.0)
_TARGETS = (448.0, 384.0, 320.0, 256.0)


def _pack(dense: Tensor) -> tuple[Tensor, ...]:
    codes = torch.empty(dense.shape, dtype=torch.uint8, device=dense.device)
    row = torch.empty(dense.shape[:-1], dtype=torch.float32, device=dense.device)
    for index in chunks(dense):
        x = read_chunk(dense, index)
        row[index] = scale = fit_rows(x, _TARGETS, _E4M3.rounded)
        codes[index] = _E4M3.encode(x * inverse(scale)[:, None])
    return codes, row


def _unpack(planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    codes, row = planes
    return unpack_rows(shape, dtype, row, lambda index: _E4M3.decode(codes[index]))


FP8 = Format(
    "fp8",
    bits=8.0,
    error=0.0506,
    pack=_pack,
    unpack=_unpack,
    planes=((torch.uint8, 1),),
    columns=byte_columns,
)
