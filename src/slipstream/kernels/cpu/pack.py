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

__all__ = ["bind_pack", "bind_pack_into", "native_pack"]

Pack = Callable[[Tensor], tuple[Tensor, ...]]
"""Packs a dense tensor `(..., O, I)` into a format's planes."""


class FormatLike(Protocol):
    """The part of `formats.Format` that packing uses; this package does not import that one."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def pack(self) -> Pack: ...  # noqa: D102
    def layout(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]: ...  # noqa: D102


def bind_pack(packed: FormatLike) -> Pack:
    """Return a function that packs a format with the library where possible, else with the format's own code.

    The latter also packs tensors on other devices, or of other dtypes.
    """
    library = _library(packed)
    if library is None:
        return packed.pack

    def pack(dense: Tensor) -> tuple[Tensor, ...]:
        return native_pack(packed, dense, library) if _serves(dense) else packed.pack(dense)

    return pack


def bind_pack_into(packed: FormatLike) -> Callable[[Tensor, tuple[Tensor, ...]], bool] | None:
    """Return a function that packs into existing planes and returns whether it could; None without a library.

    New planes for a whole model would cost fresh memory pages and a second copy.
    """
    library = _library(packed)
    if library is None:
        return None

    def pack_into(dense: Tensor, planes: tuple[Tensor, ...]) -> bool:
        layout = packed.layout(tuple(dense.shape))
        same = len(layout) == len(planes) and all(
            plane.shape == shape and plane.dtype == dtype and plane.is_contiguous()
            for plane, (shape, dtype) in zip(planes, layout, strict=True)
        )
        if not (same and _serves(dense) and dense.dim() == 2 and planes[0].device.type == "cpu"):
            return False
        native_pack(packed, dense, library, planes)
        return True

    return pack_into


def _library(packed: FormatLike) -> Library | None:
    isa = next((isa for isa in ISAS if refuse(isa) is None), None)
    return None if isa is None or FORMATS.get(packed.name, 0) == 0 else load(isa)


def _serves(dense: Tensor) -> bool:
    return dense.device.type == "cpu" and dense.dtype in DTYPES and dense.dim() > 1 and dense.numel() > 0


def native_pack(
    packed: FormatLike, dense: Tensor, library: Library, into: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """Pack a dense tensor with the library.

    Args:
        packed: A packed format.
        dense: `(..., O, I)` in float32, bfloat16 or float16, finite and not empty.
        library: For one instruction set.
        into: Existing planes of a matrix `(O, I)` to write to; None to allocate new ones.

    Returns:
        The planes, equal to those of the format's `pack`.
    """
    *lead, inputs = dense.shape
    apart = len(dense) == 1 or dense.stride(0) >= inputs
    as_is = dense.dim() == 2 and dense.stride(1) == 1 and apart
    rows = dense if as_is else dense.reshape(-1, inputs).contiguous()
    layout = packed.layout(tuple(rows.shape))
    planes = into or tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in layout)
    unused: Callable[..., Tensor] = torch.empty
    matrix = matrix_of(Weight(packed.name, tuple(rows.shape), planes, unused, dtype=dense.dtype))
    if isinstance(matrix, str):
        raise AssertionError(matrix)
    stride = max(rows.stride(0), inputs)  # a single row may have any stride
    call = PackCall(dense=address(rows), stride=stride, dtype=DTYPES[dense.dtype], packed=matrix)
    library.run("pack", call)
    return tuple(plane.view(*lead, *plane.shape[1:]) for plane in planes)
