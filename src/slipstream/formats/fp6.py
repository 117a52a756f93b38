"""6-bit floats in groups of 64 inputs with a scale each: `w = row * (scale * code)`.

bit       5    4 3    2 1 0
e2m3      s | e e | m m m        (-1)^s * 2^(e - 1) * (1 + m / 8), or m / 8 where e = 0; at most 7.5
bit       5    4 3 2    1 0
e3m2      s | e e e | m m        (-1)^s * 2^(e - 3) * (1 + m / 4), or 2^-2 * m / 4 where e = 0; at most 28

A row is padded with zeros to P, a multiple of 64 inputs. Bits 3-0 of 32 weights are stored in 16 bytes of
plane 0, bits 5-4 of 64 weights in 16 bytes of plane 1, so that one bit field of 16 consecutive bytes holds 16
consecutive weights:

plane 0   byte j (0-15) of a 32-block:   low[j] | low[j+16] << 4                    uint8   `(..., O, P / 2)`
plane 1   byte j (0-15) of a 64-block:   high[j] | high[j+16] << 2 | high[j+32] << 4 | high[j+48] << 6
                                                                                    uint8   `(..., O, P / 4)`
plane 2   scale of group 0, 1, ...       not negative, 0 for a group of zeros       float16 `(..., O, P / 64)`
plane 3   row[0] row[1] ...                                                         float32 `(..., O)`

The row's multiplier is that of int4, see `row_multiplier`. The largest magnitude of a group is scaled to 7.5,
7, 6.5, 6, 5.5 or 5 (e2m3), or 28, 24, 20 or 16 (e3m2), whichever minimises the squared error of the group:
compared with 7.5 alone, the error falls by a sixth. No weight is off by more than 1/20 of its group's largest
magnitude (e2m3), or 1/10 (e3m2), plus 2^-11 of itself for rounding through float16. If a group is so much
smaller than others of its row that its scale is a subnormal float16, the bound is 2^-11 (e2m3) or 2^-10
(e3m2) of the row's largest magnitude.

Source: OCP Microscaling Formats 1.0, section 5.3.2, for the formats; Xia et al. 2024 (arXiv 2401.14112),
section 5.2, for the split into 4 + 2 bits, with another order of the weights.
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
    from_crumbs,
    from_nibbles,
    group_columns,
    inverse,
    nibbles,
    read_chunk,
    row_multiplier,
    unpack_rows,
)
from slipstream.formats.search import fit_float
from slipstream.formats.weight_format import Format

__all__ = ["FP6", "FP6_E3M2"]

_E2M3 = MiniFloat(exponent=2, mantissa=3, largest=7.5)
_E3M2 = MiniFloat(exponent=3, mantissa=2, largest=28.0)
_GROUP = 64


def _pack(dense: Tensor, *, kind: MiniFloat, targets: tuple[float, ...]) -> tuple[Tensor, ...]:
    *lead, inputs = dense.shape
    groups = -(-inputs // _GROUP)
    padded = groups * _GROUP
    low = torch.empty((*lead, padded // 2), dtype=torch.uint8, device=dense.device)
    high = torch.empty((*lead, padded // 4), dtype=torch.uint8, device=dense.device)
    scales = torch.empty((*lead, groups), dtype=torch.float16, device=dense.device)
    row = torch.empty(lead, dtype=torch.float32, device=dense.device)
    for index in chunks(dense):
        x = read_chunk(dense, index)
        row[index] = multiplier = row_multiplier(x)
        x = F.pad(x * (1.0 / multiplier)[:, None], (0, padded - inputs))
        # Inputs of a group along the first dimension: sums and values per group then use whole vectors.
        columns = x.view(-1, _GROUP).t().contiguous()
        scale = fit_float(columns, targets, kind.rounded)
        codes = kind.encode(columns.mul_(inverse(scale))).t().reshape(-1, padded)
        low[index], high[index] = nibbles(codes & 15), crumbs(codes >> 4)
        scales[index] = scale.view(-1, groups)
    return low, high, scales, row


def _unpack(
    planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype, *, kind: MiniFloat
) -> Tensor:
    low, high, scales, row = planes

    def values(index: tuple[int | slice, ...]) -> Tensor:
        weights: Tensor = kind.decode(from_nibbles(low[index]) | from_crumbs(high[index]) << 4)
        weights = weights.unflatten(-1, (-1, _GROUP)).mul_(scales[index].float()[..., None])
        return weights.flatten(-2)

    return unpack_rows(shape, dtype, row, values)


def _format(name: str, kind: MiniFloat, targets: tuple[float, ...], *, error: float, floor: float) -> Format:
    return Format(
        name,
        bits=6 + 16 / _GROUP,
        error=error,
        pack=partial(_pack, kind=kind, targets=targets),
        unpack=partial(_unpack, kind=kind),
        group=_GROUP,
        multiple=_GROUP,
        floor=floor,
        planes=((torch.uint8, 2), (torch.uint8, 4), (torch.float16, _GROUP)),
        columns=partial(group_columns, group=_GROUP),
    )


FP6 = _format("fp6", _E2M3, (7.5, 7.0, 6.5, 6.0, 5.5, 5.0), error=0.0506, floor=2.0**-11)
FP6_E3M2 = _format("fp6-e3m2", _E3M2, (28.0, 24.0, 20.0, 16.0), error=0.1006, floor=2.0**-10)
