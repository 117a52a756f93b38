"""Packed rows times a matrix in any weight format, plus its bias.

Shapes: T packed tokens, I input width, O output width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.bind import Case, Op

__all__ = [
    "OP",
    "Beside",
    "Rounding",
    "Weight",
    "among_all",
    "linear",
    "round_rows",
    "rows_of",
    "times",
    "times_apart",
]

_LEAST = 2.0**-100
"""Rows with a smaller range are rounded to zeros: the reciprocal of their step would overflow."""


@dataclass(frozen=True)
class Rounding:
    """How the input rows of a matrix are rounded to 8 bits before they are multiplied.

    With `code = round(x * times) + zero`, a row becomes `(code - zero) * scale`. Symmetric: `times = 127 / m`
    and `scale = m / 127` for the row's largest magnitude m, and zero is 0. Asymmetric: `times = 255 / r` and
    `scale = r / 255` for the range r from the smallest to the largest number (0 included), with
    `zero = round(-least * times)` and codes 0 to 255. Everything is computed in float32, rounding to the
    nearest even; a row that holds NaN or infinity becomes NaN.

    In fp8 a code is the e4m3 number nearest to `x / scale`, and the scale is the smallest power of two with
    which the row's largest magnitude is at most 448; a rounded row is therefore exact in bfloat16.

    Source: Dettmers et al. 2022 (arXiv 2208.07339), section 2.1, rows of x; Jacob et al. 2018
    (arXiv 1712.05877), eq. 1, for the zero point; Micikevicius et al. 2022 (arXiv 2209.05433) for e4m3.

    Attributes:
        symmetric: Without a zero point.
        groups: The number of parts of a row that have a scale each. If it does not divide the row, the first
            parts have one number more; a row with fewer numbers than groups has a part for each number.
        codes: "int8" or "fp8"; "fp8" is symmetric and has no groups.
        above: Only products of more rows than this round them.
    """

    symmetric: bool = True
    groups: int = 1
    codes: Literal["int8", "fp8"] = "int8"
    above: int = 0

    @property
    def suffix(self) -> str:
        """The suffix of the name of a format whose inputs are rounded like this."""
        return f"-a8{'' if self.symmetric else '-asym'}{'' if self.groups == 1 else f'-g{self.groups}'}"


def round_rows(x: Tensor, rounding: Rounding) -> Tensor:
    """Return rows `(..., I)` rounded, in float32; `x` may have any floating dtype and is not changed."""
    x = x.float()
    if x.shape[-1] == 0:
        return x
    if rounding.codes == "fp8":
        return _in_fp8(x)
    if rounding.groups > 1:
        parts = x.tensor_split(min(rounding.groups, x.shape[-1]), dim=-1)
        whole = Rounding(rounding.symmetric)
        return torch.cat([round_rows(part, whole) for part in parts], dim=-1)
    zero_or_nan = (x * 0).sum(-1, keepdim=True)
    if rounding.symmetric:
        span, steps = x.abs().amax(-1, keepdim=True), 127.0
    else:
        least = x.amin(-1, keepdim=True).clamp(max=0)
        span, steps = x.amax(-1, keepdim=True).clamp(min=0) - least, 255.0
    full = torch.full_like(span, steps)  # dividing with a Python number would multiply by the reciprocal
    times = torch.where(span >= _LEAST, full / span, 0.0)
    scale = span / full + zero_or_nan
    if rounding.symmetric:
        return (x * times).round() * scale
    zero = (-least * times).round()
    return (((x * times).round() + zero).clamp(0, 255) - zero) * scale


def _in_fp8(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    # 448 = 0.875 * 2^9
    part, exponent = torch.frexp(largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent - 9 + (part > 0.875))
    codes = torch.where(largest >= _LEAST, x / scale, 0.0).to(torch.float8_e4m3fn).float()
    return codes * scale + (x * 0).sum(-1, keepdim=True)


@dataclass(frozen=True)
class Beside:
    """A low-rank product (LoRA) added to a matrix's product, not merged into it: `x -> (x @ a.T) @ b.T`.

    Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1; its scale is already multiplied into `b`.

    Attributes:
        a: `(R, I)`, of one adapter, or of several stacked along R.
        b: `(O, R)`.
    """

    a: Tensor
    b: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return the addend `(..., O)` for rows `(..., I)`, in their dtype."""
        return F.linear(F.linear(x.to(self.a.dtype), self.a), self.b).to(x.dtype)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> Beside:
        """Return a copy with `fn`, a move or a cast, applied to both matrices."""
        return Beside(fn(self.a), fn(self.b))


@dataclass(frozen=True)
class Weight:
    """A matrix (or a stack of them, one per expert) in a weight format, with its bias.

    Attributes:
        format: The format's name; "plain" is a dense tensor.
        shape: Shape `(O, I)` or `(experts, O, I)` of the matrix that the planes represent.
        planes: The format's tensors. Plain has one or several runs of rows, which concatenate to `shape`: on
            the CPU, for example, the model's own q, k and v, because joining them would copy the model
            without any gain. In a packed format the dimensions of each plane are the experts first, then the
            rows.
        unpack: Makes the dense matrix from the planes, its shape and a dtype; not used for plain.
        bias: `(O,)` or `(experts, O)`, or None.
        dtype: The dtype that a packed matrix is unpacked to; None for plain, whose plane has its own.
        rounding: Rounding of the rows that it multiplies; None for no rounding.
        beside: Unmerged adapters. Implementations of the op ignore them; `times` adds their product. They are
            not part of the matrix that the planes represent.
        inside: The range of the inputs of `shape` that the multiplied rows have, if they do not have all of
            them: ranks may share a group of inputs with one scale. `times` pads the rows with zeros.
    """

    format: str
    shape: tuple[int, ...]
    planes: tuple[Tensor, ...]
    unpack: Callable[..., Tensor]
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    rounding: Rounding | None = None
    beside: Beside | None = None
    inside: range | None = None

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype in which rows are multiplied."""
        return self.planes[0].dtype if self.dtype is None else self.dtype

    @property
    def packed_as(self) -> str:
        """The format's name without the suffix for the rounding of rows."""
        return self.format if self.rounding is None else self.format.removesuffix(self.rounding.suffix)

    def dense(self) -> Tensor:
        """Return the dense matrix, restricted to `inside`; for "plain" in a single run the stored tensor."""
        if self.dtype is not None:
            dense = self.unpack(self.planes, self.shape, self.dtype)
            return dense if self.inside is None else dense[..., self.inside.start : self.inside.stop]
        return self.planes[0] if len(self.planes) == 1 else torch.cat(self.planes, dim=-2)

    def at(self, index: int) -> Weight:
        """Return one expert's matrix with its bias, sharing memory."""
        planes, bias = tuple(plane[index] for plane in self.planes), self.bias
        return replace(self, shape=self.shape[1:], planes=planes, bias=None if bias is None else bias[index])

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the matrix, `(n, I)`, without unpacking the others.

        Args:
            index: `(n,)` int64 row indices, in any order.

        Raises:
            IndexError: An index is out of range.
        """
        if self.dtype is None:
            return self.dense().index_select(0, index)
        planes = tuple(plane.index_select(0, index) for plane in self.planes)
        return self.unpack(planes, (len(index), self.shape[-1]), self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held by the planes and the bias."""
        tensors = self.planes if self.bias is None else (*self.planes, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> Weight:
        """Return the weight with `fn`, a move or a cast, applied to each of its tensors.

        A cast does not change packed planes but the dtype that they are unpacked to.
        """
        bias = None if self.bias is None else fn(self.bias)
        beside = None if self.beside is None else self.beside.apply(fn)
        if self.dtype is None:
            return replace(self, planes=tuple(fn(plane) for plane in self.planes), bias=bias, beside=beside)
        planes = tuple(_moved(plane, fn) for plane in self.planes)
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.planes[0].device)).dtype
        return replace(self, planes=planes, bias=bias, dtype=dtype, beside=beside)


def _moved(plane: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    moved = fn(plane)
    return moved if moved.dtype == plane.dtype else plane.to(moved.device)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return `x @ dense(weight).T + bias`, with the rows of x rounded first if the weight has a `rounding`.

    Rounded rows are multiplied in float32, because 8-bit codes times their scales are exact in no 16-bit
    dtype.

    Args:
        x: `(T, I)`, any floating dtype.
        weight: Of shape `(O, I)`.

    Returns:
        `(T, O)` in the dtype of `x`.
    """
    rounding = weight.rounding
    if rounding is not None and weight.dtype is not None and x.shape[:-1].numel() > rounding.above:
        wide = torch.promote_types(weight.dtype, torch.float32)
        bias = None if weight.bias is None else weight.bias.to(wide)
        dense = weight.unpack(weight.planes, weight.shape, wide)
        return F.linear(round_rows(x, rounding).to(wide), dense, bias).to(x.dtype)
    if weight.dtype is not None:
        return F.linear(x, weight.unpack(weight.planes, weight.shape, weight.dtype), weight.bias)
    if len(weight.planes) == 1:
        return F.linear(x, weight.planes[0], weight.bias)
    runs = weight.planes
    biases = [None] * len(runs) if weight.bias is None else weight.bias.split([len(rows) for rows in runs])
    return torch.cat([F.linear(x, rows, bias) for rows, bias in zip(runs, biases, strict=True)], dim=-1)


def times(run: Callable[[Tensor, Weight], Tensor], x: Tensor, weight: Weight) -> Tensor:
    """Return the product, computed by an implementation of the op, plus that of unmerged adapters."""
    product = run(among_all(x, weight), weight)
    return product if weight.beside is None else product + weight.beside.of(x)


_MANY_ROWS = 64
"""Rows from which one product per run of a matrix is as fast as one for all runs."""


def times_apart(
    run: Callable[[Tensor, Weight], Tensor], x: Tensor, weight: Weight, outputs: tuple[int, ...]
) -> list[Tensor]:
    """Return `times` cut into parts of `outputs` columns, which do not share a tensor if that saves a copy.

    Joining the products of q, k and v takes 0.05 to 0.1 of the time of 3136 rows times 96 x 288.
    """
    runs = [len(plane) for plane in weight.planes] if weight.dtype is None else []
    apart = runs == [count for count in outputs if count] and weight.shape[-2] == sum(runs)
    if not apart or len(runs) == 1 or len(x) < _MANY_ROWS or weight.beside is not None:
        return list(times(run, x, weight).split(outputs, dim=-1))
    biases = [None] * len(runs) if weight.bias is None else weight.bias.split(runs)
    made = iter(zip(weight.planes, biases, strict=True))
    parts = []
    for count in outputs:
        if count == 0:
            parts.append(x.new_empty(len(x), 0))
            continue
        plane, bias = next(made)
        parts.append(run(x, replace(weight, shape=(count, weight.shape[-1]), planes=(plane,), bias=bias)))
    return parts


def rows_of(x: Tensor) -> Tensor:
    """Reshape `(..., I)` to `(T, I)`, also if I is 0, where a dimension of -1 would be ambiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def among_all(x: Tensor, weight: Weight) -> Tensor:
    """Pad rows with zeros to all inputs of the matrix, if they have only those of `weight.inside`."""
    if weight.inside is None:
        return x
    return F.pad(x, (weight.inside.start, weight.shape[-1] - weight.inside.stop))


def _case(
    name: str, rows: int, inputs: int, outputs: int, *, bias: bool, runs: tuple[int, ...] | None = None
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        matrix = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
        b = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        planes = matrix.split(runs or (outputs,))
        return {"x": x, "weight": Weight("plain", (outputs, inputs), planes, lambda *_: matrix, b)}

    return Case(name, make)


def _rounded(
    name: str, rows: int, inputs: int, outputs: int, rounding: Rounding, *, bias: bool = False
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        # Rows of many magnitudes, none centred, one of zeros and one too small to be distinguished from it.
        x = (torch.randn(rows, inputs, generator=generator) + 0.3) * torch.logspace(-2, 2, rows)[:, None]
        x[rows // 2 :][:1] = 0
        codes = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        factors = (torch.rand(outputs, generator=generator) + 0.5) / 127 / inputs**0.5
        b = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        planes = (codes, factors)
        weight = Weight(f"int8{rounding.suffix}", (outputs, inputs), planes, _dense_int8, b, dtype, rounding)
        return {"x": x.to(dtype), "weight": weight}

    return Case(f"{name}, inputs rounded{rounding.suffix}", make)


def _dense_int8(planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    codes, factors = planes
    return codes.to(dtype) * factors.to(dtype)[:, None]


_SYMMETRIC, _ASYMMETRIC = Rounding(), Rounding(symmetric=False)

OP = Op(
    "linear",
    linear,
    (
        _case("one row", 1, 64, 128, bias=False),
        _case("one row, bias", 1, 576, 192, bias=True),
        _case("a few rows", 5, 96, 33, bias=True),
        _case("odd widths", 3, 77, 101, bias=False),
        _case("one more than a tile", 65, 129, 65, bias=True),
        _case("width one", 2, 1, 1, bias=True),
        _case("panels of many rows, the last of a few", 97, 320, 590, bias=True),
        _case("rows in three runs", 3, 64, 96, bias=True, runs=(64, 16, 16)),
        _case("rows in two runs, one row", 1, 96, 192, bias=False, runs=(96, 96)),
        *(
            case
            for rounding in (_SYMMETRIC, _ASYMMETRIC)
            for case in (
                _rounded("one row", 1, 64, 128, rounding),
                _rounded("a few rows", 7, 193, 33, rounding, bias=True),
                _rounded("width one", 3, 1, 1, rounding),
                _rounded("more than a few", 21, 65, 70, rounding, bias=True),
                _rounded("one more than a tile", 65, 321, 65, rounding, bias=True),
                _rounded("many", 131, 128, 40, rounding),
                _rounded("panels of many rows, the last of a few", 97, 320, 590, rounding),
            )
        ),
    ),
)
