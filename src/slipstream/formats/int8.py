"""8-bit integers with one scale per row, without a zero point: `w = row * code`, code -127 to 127.

plane 0   code[0,0] code[0,1] ... code[0,I-1] | code[1,0] ...   int8 `(..., O, I)`, a byte each
plane 1   row[0] row[1] ...                                      float32 `(..., O)`

Nothing is padded. The row's largest magnitude is scaled to 127, or up to half a step more, whichever
minimises the squared error of the row; no weight is off by more than half a step, 1/254 of the largest
magnitude.

Source: Jacob et al. 2018 (arXiv 1712.05877), eq. 1 with Z = 0; Dettmers et al. 2022 (arXiv 2208.07339),
section 2.1, for rows of language models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.formats.rows import byte_columns, chunks, fit_rows, inverse, read_chunk, unpack_rows
from slipstream.formats.weight_format import Format

__all__ = ["INT8"]

_TARGETS = (127.0, 127.25, 127.5)


def _rounded(values: Tensor) -> Tensor:
    return values.round_().clamp_(-127, 127)


def _pack(dense: Tensor) -> tuple[Tensor, ...]:
    codes = torch.empty(dense.shape, dtype=torch.int8, device=dense.device)
    row = torch.empty(dense.shape[:-1], dtype=torch.float32, device=dense.device)
    for index in chunks(dense):
        x = read_chunk(dense, index)
        row[index] = scale = fit_rows(x, _TARGETS, _rounded)
        codes[index] = _rounded(x * inverse(scale)[:, None])
    return codes, row


def _unpack(planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    codes, row = planes
    return unpack_rows(shape, dtype, row, lambda index: codes[index].float())


INT8 = Format(
    "int8",
    bits=8.0,
    error=0.004,
    pack=_pack,
    unpack=_unpack,
    planes=((torch.int8, 1),),
    columns=byte_columns,
)
