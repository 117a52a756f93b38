"""Find the scale (and minimum) of groups of 4-bit integers or small floats that minimises the squared error.

The result for integers always uses the codes at both ends of the range; for floats, the largest magnitude
gets one of the codes that the search starts with. Packing unpacked weights therefore starts from the same
range and finds no better one: it gives the same numbers and, except for groups of a single magnitude, the
same planes.

Shapes: g weights of a group, N groups; tensors are `(g, N)`, results `(N,)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.formats.rows import inverse

__all__ = ["fit_float", "fit_range", "fit_signed"]

_LEVELS = 15
_WIDER = 0.9
"""A second start: the range is divided into 0.9 steps more, so that its ends are clipped by nearly half a
step. Further starts at -0.9, -0.45 and 0.45 lower the root mean square error by another 1 % and double the
time."""
_EDGE = 0.499
"""How many steps an end of the range may be off the last code: below a half, so that it rounds to it."""
_NOISE = 4e-6
"""Errors are compared by sums that are exact to about this share of the sum of squares."""
_ONE_NUMBER = 1 / 32
"""Groups whose range is below this share of their minimum are stored as a single number: rounding the minimum
alone would be off by a good part of a step."""


def fit_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Find the scale and the minimum for codes 0 to 15, as float32 numbers that are exact in float16.

    Args:
        x: `(g, N)` float32; not changed.

    Returns:
        Nonnegative scales, and minima; the scale is 0 for a group that is stored as a single number.
    """
    low, high = x.aminmax(dim=0)
    start = _half(low)
    scale, minimum = _toward_zero((high - start) / _LEVELS), start
    flat = _LEVELS * scale < start.abs() * _ONE_NUMBER
    y = x - start  # makes sums exact enough for groups that lie far from zero
    low, high, reach = low - start, high - start, high - low
    codes, spare = torch.empty_like(x), torch.empty_like(x)
    sums = (_sum(y, spare), _sum(torch.mul(y, y, out=spare), spare))

    def encode(scale: Tensor, offset: Tensor | float) -> None:
        torch.sub(y, offset, out=codes)
        codes.mul_(inverse(scale)).round_().clamp_(0, _LEVELS)

    encode(scale, 0.0)
    least = _sum(torch.mul(codes, scale, out=spare).sub_(y).square_(), spare)
    best = scale, minimum, least
    best = _better(best, codes, y, start, (low, high), sums, spare)
    wide = reach / (_LEVELS + _WIDER)
    encode(wide, low + wide * (_WIDER / 2))
    best = _better(best, codes, y, start, (low, high), sums, spare)
    encode(best[0], best[1] - start)
    best = _better(best, codes, y, start, (low, high), sums, spare)
    scale = torch.where(flat, 0.0, best[0])
    return scale, torch.where(flat, _half(start + (low + high) / 2), best[1])


def _better(
    best: tuple[Tensor, Tensor, Tensor],
    codes: Tensor,
    y: Tensor,
    start: Tensor,
    ends: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor],
    spare: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the best fit so far by the least squares fit for the given codes where that is better."""
    n = len(codes)
    (low, high), (sum_y, sum_yy) = ends, sums
    sum_q = _sum(codes, spare)
    sum_qq = _sum(torch.mul(codes, codes, out=spare), spare)
    sum_qy = _sum(torch.mul(codes, y, out=spare), spare)
    slope = (n * sum_qy - sum_q * sum_y) * inverse(n * sum_qq - sum_q * sum_q)
    minimum = _half(start + (sum_y - slope * sum_q) / n)
    offset = minimum - start
    scale = _half((sum_qy - offset * sum_q) * inverse(sum_qq))
    error = (
        sum_yy + scale * (scale * sum_qq - 2 * sum_qy) + offset * (n * offset - 2 * sum_y + 2 * scale * sum_q)
    )
    fits = (low - offset).abs() <= scale * _EDGE
    fits &= (high - offset - _LEVELS * scale).abs() <= scale * _EDGE
    fits &= _LEVELS * scale >= minimum.abs() * _ONE_NUMBER
    fits &= error < best[2] - _NOISE * sum_yy
    return (
        torch.where(fits, scale, best[0]),
        torch.where(fits, minimum, best[1]),
        torch.where(fits, error, best[2]),
    )


def fit_signed(x: Tensor) -> Tensor:
    """Find the scale for codes -8 to 7, as a float32 number that is exact in float16.

    The largest magnitude of a group is stored as -8 (with a negative scale if it is positive) or as 7 or -7.

    Args:
        x: `(g, N)` float32; not changed.

    Returns:
        Scales; 0 for a group of zeros.
    """
    low, high = x.aminmax(dim=0)
    peak = torch.where(high > -low, high, low)
    other = torch.where(high > -low, low, high)
    codes, spare = torch.empty_like(x), torch.empty_like(x)
    sum_xx = _sum(torch.mul(x, x, out=spare), spare)

    def encode(scale: Tensor) -> None:
        torch.mul(x, inverse(scale), out=codes)
        codes.round_().clamp_(-8, 7)

    def exact(scale: Tensor) -> Tensor:
        encode(scale)
        return _sum(torch.mul(codes, scale, out=spare).sub_(x).square_(), spare)

    at_eight, at_seven = _toward_zero(peak / -8), _toward_zero(peak.abs() / 7)
    least, rival = exact(at_eight), exact(at_seven)
    scale = torch.where(rival < least, at_seven, at_eight)
    least = torch.minimum(rival, least)
    for begin in (at_eight, at_seven, None):
        encode(scale if begin is None else begin)
        sum_qq = _sum(torch.mul(codes, codes, out=spare), spare)
        sum_qx = _sum(torch.mul(codes, x, out=spare), spare)
        fit = _half(sum_qx * inverse(sum_qq))
        error = sum_xx + fit * (fit * sum_qq - 2 * sum_qx)
        position = peak * inverse(fit)
        fits = (position + 8).abs() <= _EDGE
        fits |= ((position.abs() - 7).abs() <= _EDGE) & (fit > 0)
        fits &= other * inverse(fit) <= 8
        fits &= error < least - _NOISE * sum_xx
        scale, least = torch.where(fits, fit, scale), torch.where(fits, error, least)
    return scale


def fit_float(x: Tensor, targets: Sequence[float], rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Find the scale for codes of small floats, as a float32 number that is exact in float16.

    Args:
        x: `(g, N)` float32; not changed.
        targets: Representable values that the group's largest magnitude may be scaled to. The scale is
            rounded down to a float16, so that the scaled magnitude is slightly larger and rounds to the same
            code.
        rounded: Rounds scaled weights to representable values; may overwrite its argument, a fresh tensor.

    Returns:
        Nonnegative scales; 0 for a group of zeros.
    """
    largest = x.abs().amax(dim=0)
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    spare = torch.empty_like(x)
    for target in targets:
        # Dividing by a Python number would multiply by its reciprocal on a GPU.
        scale = _toward_zero(largest / torch.full_like(largest, target))
        values = rounded(x * inverse(scale))
        error = _sum(values.mul_(scale).sub_(x).square_(), spare)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _sum(x: Tensor, spare: Tensor) -> Tensor:
    """Sum over the group, adding halves: the order of `Tensor.sum` would depend on the number of groups.

    Args:
        x: `(g, N)`, g a power of two; may be `spare` itself.
        spare: `(g, N)`; overwritten.
    """
    half = len(x) // 2
    while half > 1:
        x = torch.add(x[:half], x[half : 2 * half], out=spare[:half])
        half //= 2
    return x[0] + x[1]


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _toward_zero(x: Tensor) -> Tensor:
    """Round to the nearest float16 of no larger magnitude: then the end of a range gets the last code."""
    half = x.half()
    above = (half.float().abs() > x.abs()).to(torch.int16)
    return (half.view(torch.int16) - above).view(torch.float16).float()
