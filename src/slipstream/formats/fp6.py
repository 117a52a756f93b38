"""6-bit floats with one scale per row, four bits of each in one plane and two in another: `w = row * code`.

bit       5    4 3    2 1 0
e2m3      s | e e | m m m        (-1)^s * 2^(e - 1) * (1 + m / 8), or m / 8 where e = 0; at most 7.5
bit       5    4 3 2    1 0
e3m2      s | e e e | m m        (-1)^s * 2^(e - 3) * (1 + m / 4), or 2^-2 * m / 4 where e = 0; at most 28

A row is padded with zeros to P, a multiple of 64 inputs. Bits 3-0 of 32 weights lie in 16 bytes of plane 0,
bits 5-4 of 64 weights in 16 bytes of plane 1, so that one field of 16 consecutive bytes holds 16 consecutive
weights:

plane 0   byte j (0-15) of a 32-block:   low[j] | low[j+16] << 4                     uint8 `(..., O, P / 2)`
plane 1   byte j (0-15) of a 64-block:   high[j] | high[j+16] << 2 | high[j+32] << 4 | high[j+48] << 6
                                                                                     uint8 `(..., O, P / 4)`
plane 2   row[0] row[1] ...                                                          float32 `(..., O)`

The row's largest magnitude becomes one of a few values near the top, whichever makes the squared error of the
row least. No weight is off by more than 1/30 of the row's largest magnitude (e2m3), or 1/10 (e3m2), and 2^-11
of itself for rounding by way of float16.

Source: formats: OCP Microscaling Formats 1.0, section 5.3.2; the split in 4 + 2 bits: Xia et al. 2024
(arXiv 2401.14112), section 5.2, with another order of the weights.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.formats.minifloat import MiniFloat
from slipstream.formats.rows import (
    chunks,
    crumbs,
    fit_rows,
    from_crumbs,
    from_nibbles,
    inverse,
    nibbles,
    read_chunk,
    unpack_rows,
)
from slipstream.formats.weight_format import Format

__all__ = ["FP6", "FP6_E3M2"]

_E2M3 = MiniFloat(exponent=2, mantissa=3, largest=7.5)
_E3M2 = MiniFloat(exponent=3, mantissa=2, largest=28.0)
_MULTIPLE = 64


def _pack(dense: Tensor, *, kind: MiniFloat, targets: tuple[float, ...]) -> tuple[Tensor, ...]:
    *lead, inputs = dense.shape
    padded = -(-inputs // _MULTIPLE) * _MULTIPLE
    low = torch.empty((*lead, padded // 2), dtype=torch.uint8, device=dense.device)
    high = torch.empty((*lead, padded // 4), dtype=torch.uint8, device=dense.device)
    row = torch.empty(lead, dtype=torch.float32, device=dense.device)
    for index in chunks(dense):
        x = read_chunk(dense, index)
        row[index] = scale = fit_rows(x, targets, kind.rounded)
        codes = F.pad(kind.encode(x * inverse(scale)[:, None]), (0, padded - inputs))
        low[index], high[index] = nibbles(codes & 15), crumbs(codes >> 4)
    return low, high, row


def _unpack(
    planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype, *, kind: MiniFloat
) -> Tensor:
    low, high, row = planes

    def values(index: tuple[int | slice, ...]) -> Tensor:
        return kind.decode(from_nibbles(low[index]) | from_crumbs(high[index]) << 4)

    return unpack_rows(shape, dtype, row, values)


def _columns(planes: tuple[Tensor, ...], run: range) -> tuple[Tensor, ...]:
    low, high, row = planes
    padding = (0, -len(run) % _MULTIPLE)
    four, two = (
        F.pad(code[..., run.start : run.stop], padding) for code in (from_nibbles(low), from_crumbs(high))
    )
    return nibbles(four), crumbs(two), row


def _format(name: str, kind: MiniFloat, targets: tuple[float, ...], error: float) -> Format:
    pack, unpack = partial(_pack, kind=kind, targets=targets), partial(_unpack, kind=kind)
    planes = ((torch.uint8, 2), (torch.uint8, 4))
    return Format(name, 6.0, error, pack, unpack, multiple=_MULTIPLE, planes=planes, columns=_columns)


FP6 = _format("fp6", _E2M3, (7.5, 7.625, 7.75), error=0.0339)
FP6_E3M2 = _format("fp6-e3m2", _E3M2, (28.0, 24.0, 20.0, 16.0), error=0.1006)
