"""The dense matrix itself, in the engine's dtype: one plane, row by row.

plane 0   w[0,0] w[0,1] ... w[0,I-1] | w[1,0] ...      `(O, I)`, contiguous or a view of the model's own
tensor
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.formats.weight_format import Format

__all__ = ["PLAIN"]


def _pack(dense: Tensor) -> tuple[Tensor, ...]:
    return (dense,)


def _unpack(planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return planes[0].to(dtype)


PLAIN = Format("plain", bits=0, error=0.0, pack=_pack, unpack=_unpack)
