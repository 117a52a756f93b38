"""Floating-point numbers of at most eight bits, converted through float16, whose fields are wider.

A code is `sign | exponent | mantissa`. Scaled by `2^(bias - 15)`, a small float has the same exponent field
in float16 as in its own code, including subnormals, so that rounding the mantissa of the float16 and shifting
it down gives the code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MiniFloat"]

_HALF_BIAS, _HALF_MANTISSA, _HALF_MAGNITUDE = 15, 10, 0x7FFF


@dataclass(frozen=True)
class MiniFloat:
    """A small float without infinities.

    Attributes:
        exponent: Bits of the exponent, at most 4; its bias is `2^(exponent - 1) - 1`.
        mantissa: Bits of the mantissa.
        largest: The largest magnitude; larger values are rounded down to it.
    """

    exponent: int
    mantissa: int
    largest: float

    @property
    def _factor(self) -> float:
        bias = (1 << self.exponent - 1) - 1
        return math.ldexp(1.0, bias - _HALF_BIAS)

    @property
    def _shift(self) -> int:
        return _HALF_MANTISSA - self.mantissa

    @property
    def _sign(self) -> int:
        return self.exponent + self.mantissa

    def rounded(self, values: Tensor) -> Tensor:
        """Round float32 values to the nearest representable numbers, ties to even, in float32."""
        magnitude = self._magnitude(self._half(values)) << self._shift
        return magnitude.view(torch.float16).float().mul_(1 / self._factor).copysign_(values)

    def encode(self, values: Tensor) -> Tensor:
        """Return the uint8 codes of the numbers nearest to float32 values."""
        half = self._half(values)
        return (self._magnitude(half) | (half < 0).to(torch.int16) << self._sign).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the float32 values of uint8 codes."""
        wide = codes.to(torch.int16)
        magnitude = (wide & (1 << self._sign) - 1) << self._shift
        half = magnitude | (wide >> self._sign) << 15
        return half.view(torch.float16).float().mul_(1 / self._factor)

    def _half(self, values: Tensor) -> Tensor:
        return (values * self._factor).half().view(torch.int16)

    def _magnitude(self, half: Tensor) -> Tensor:
        """Return the code without its sign, as int16."""
        magnitude = half & _HALF_MAGNITUDE
        last = magnitude >> self._shift & 1
        largest = (
            torch.tensor(self.largest * self._factor, dtype=torch.float16, device="cpu")
            .view(torch.int16)
            .item()
        )
        return (magnitude + last + ((1 << self._shift - 1) - 1) >> self._shift).clamp_(
            max=int(largest) >> self._shift
        )
