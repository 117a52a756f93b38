"""4-bit integers in groups along the input, each group with a scale and, where asymmetric, a minimum.

    asymmetric   w = row * (scale * code + minimum)       code 0 to 15
    symmetric    w = row * scale * (code - 8)             code 0 to 15, the scale may be negative

A row is padded to P, a multiple of the group (32, 64 or 128 inputs), by repeating its last weight. 32 weights
are stored in 16 bytes, whatever the group, so that one half of each of 16 consecutive bytes holds 16
consecutive weights:

plane 0   byte j (0-15) of a 32-block:   code[j] | code[j+16] << 4       uint8   `(..., O, P / 2)`
plane 1   scale of group 0, 1, ...                                       float16 `(..., O, P / group)`
plane 2   minimum of group 0, 1, ... (asymmetric only)                   float16 `(..., O, P / group)`
last      row[0] row[1] ...                                              float32 `(..., O)`

With groups of 32, the asymmetric form with `row = 1` is bit-identical to ggml's Q4_1, and represents the same
numbers as its Q4_0, whose scale d corresponds to a minimum of -8 d: such tensors are taken over without
packing. For any other form, including the symmetric one, they are packed again. The row's multiplier is 1 if
its largest magnitude lies in [2^-10, 2^14), as that of trained weights does, and otherwise the power of 2^24
that brings it there: it keeps huge and tiny weights within the range of float16.

The scale and the minimum are found by search: codes are computed for a few ranges, then the least squares fit
for these codes, and the same once more from the best fit. Compared with the plain range, the squared error
falls by an eighth. No weight is off by more than 1/14 of the largest magnitude of its group (asymmetric), or
2/15 (symmetric: -8 has no positive counterpart). A group whose range is below 1/32 of its minimum is stored
as a single number.

Source: Dettmers and Zettlemoyer 2022 (arXiv 2212.09720), section 2.2, for groups; ggml, `ggml-common.h`
(`block_q4_0`, `block_q4_1`) for the order of bytes, and its `make_qkx2_quants` for alternating codes and fit.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.formats.rows import (
    chunks,
    from_nibbles,
    group_columns,
    inverse,
    read_chunk,
    row_multiplier,
    unpack_rows,
)
from slipstream.formats.search import fit_range, fit_signed
from slipstream.formats.weight_format import Format

__all__ = ["INT4", "INT4_VARIANTS", "int4"]

_GROUPS = (32, 64, 128)
_BLOCK = 32


def int4(group: int = 32, *, symmetric: bool = False) -> Format:
    """Return the int4 format with groups of 32, 64 or 128 inputs.

    Args:
        group: Inputs that share a scale.
        symmetric: Without a minimum.
    """
    if group not in _GROUPS:
        raise AssertionError(f"int4 has groups of {_GROUPS}, not of {group}")
    plain = group == _GROUPS[0] and not symmetric
    name = "int4" if plain else f"int4-g{group}{'-sym' if symmetric else ''}"
    return Format(
        name,
        bits=4 + (16 if symmetric else 32) / group,
        error=0.1335 if symmetric else 0.0716,
        pack=partial(_pack, group=group, symmetric=symmetric),
        unpack=partial(_unpack, group=group),
        group=group,
        multiple=group,
        floor=2.0**-11,
        planes=((torch.uint8, 2), *((torch.float16, group),) * (1 if symmetric else 2)),
        columns=partial(group_columns, group=group),
    )


def _pack(dense: Tensor, *, group: int, symmetric: bool) -> tuple[Tensor, ...]:
    *lead, inputs = dense.shape
    groups = -(-inputs // group)
    codes = torch.empty((*lead, groups * group // 2), dtype=torch.uint8, device=dense.device)
    scales, minima = (
        torch.empty((*lead, groups), dtype=torch.float16, device=dense.device) for _ in range(2)
    )
    row = torch.empty(lead, dtype=torch.float32, device=dense.device)
    for index in chunks(dense):
        x = read_chunk(dense, index)
        row[index] = multiplier = row_multiplier(x)
        x = x * (1.0 / multiplier)[:, None]
        if groups * group > inputs:
            x = F.pad(x[None], (0, groups * group - inputs), mode="replicate")[0]
        # Inputs of a group along the first dimension: sums and values per group then use whole vectors.
        columns = x.view(-1, group).t().contiguous()
        if symmetric:
            scale = fit_signed(columns)
            rounded = torch.mul(columns, inverse(scale)).round_().clamp_(-8, 7).add_(8)
        else:
            scale, minimum = fit_range(columns)
            rounded = torch.sub(columns, minimum).mul_(inverse(scale)).round_().clamp_(0, 15)
            minima[index] = minimum.view(-1, groups)
        scales[index] = scale.view(-1, groups)
        codes[index] = _bytes(rounded.to(torch.uint8)).reshape(-1, codes.shape[-1])
    return (codes, scales, row) if symmetric else (codes, scales, minima, row)


def _bytes(codes: Tensor) -> Tensor:
    """Pack codes `(group, n)` uint8 into bytes `(n, group / 2)`."""
    low, high = codes.unflatten(0, (-1, 2, _BLOCK // 2)).unbind(1)
    packed: Tensor = low | high << 4
    return packed.flatten(0, 1).t()


def _unpack(planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype, *, group: int) -> Tensor:
    codes, scales, *minima, row = planes

    def values(index: tuple[int | slice, ...]) -> Tensor:
        weights: Tensor = from_nibbles(codes[index]).float().unflatten(-1, (-1, group))
        scale = scales[index].float()[..., None]
        if minima:  # two passes are five times as fast as `addcmul` with two tensors to broadcast
            weights = weights.mul_(scale).add_(minima[0][index].float()[..., None])
        else:
            weights = weights.sub_(8).mul_(scale)
        return weights.flatten(-2)

    return unpack_rows(shape, dtype, row, values)


INT4 = int4()
INT4_VARIANTS = tuple(
    int4(group, symmetric=symmetric)
    for symmetric in (False, True)
    for group in _GROUPS
    if symmetric or group != _GROUPS[0]
)
