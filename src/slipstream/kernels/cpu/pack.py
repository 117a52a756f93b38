"""Packs weights natively: the same planes as the formats' own code, ten to twenty times as fast.

Shapes: O output width, I input width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.cpu.abi import DTYPES, FORMATS, PackCall, address
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.linear import Weight

__all__ = ["bind_pack", "native_pack"]

Pack = Callable[[Tensor], tuple[Tensor, ...]]
"""From a dense tensor `(..., O, I)` to a format's planes."""


class FormatLike(Protocol):
    """What packing needs of `formats.Format`, which stands beside this room."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def pack(self) -> Pack: ...  # noqa: D102
    def layout(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]: ...  # noqa: D102


def bind_pack(packed: FormatLike) -> Pack:
    """Choose what packs a format: the library, or the format's own code.

    The latter also takes tensors that are elsewhere, or of other dtypes.
    """
    isa = next((isa for isa in ISAS if refuse(isa) is None), None)
    library = None if isa is None else load(isa)
    if library is None or FORMATS.get(packed.name, 0) == 0:
        return packed.pack

    def pack(dense: Tensor) -> tuple[Tensor, ...]:
        if dense.device.type != "cpu" or dense.dtype not in DTYPES or dense.dim() < 2 or not dense.numel():
            return packed.pack(dense)
        return native_pack(packed, dense, library)

    return pack


def native_pack(packed: FormatLike, dense: Tensor, library: Library) -> tuple[Tensor, ...]:
    """Pack by the library.

    Args:
        packed: A packed format.
        dense: `(..., O, I)` in float32, bfloat16 or float16, finite and not empty.
        library: For one instruction set.

    Returns:
        New planes, as the format's `pack`.
    """
    *lead, inputs = dense.shape
    rows = dense if dense.dim() == 2 and dense.stride(1) == 1 else dense.reshape(-1, inputs).contiguous()
    planes = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in packed.layout(tuple(rows.shape)))
    unused: Callable[..., Tensor] = torch.empty
    matrix = matrix_of(Weight(packed.name, tuple(rows.shape), planes, unused, dtype=dense.dtype))
    if isinstance(matrix, str):
        raise AssertionError(matrix)
    stride = max(rows.stride(0), inputs)  # a single row may have any
    call = PackCall(dense=address(rows), stride=stride, dtype=DTYPES[dense.dtype], packed=matrix)
    library.run("pack", call)
    return tuple(plane.view(*lead, *plane.shape[1:]) for plane in planes)
