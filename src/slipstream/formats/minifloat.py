"""Floating point numbers of fewer than nine bits, by way of float16, whose fields are the same but wider.

A code is `sign | exponent | mantissa`. Scaled by `2^(bias - 15)`, a small float has in float16 the exponent
field that its own code has, subnormals too, so that rounding the mantissa of the float16 and shifting it down
makes the code.
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
        largest: The largest magnitude; what exceeds it is rounded down to it.
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
        """The nearest numbers that have codes, ties to even, float32 for float32."""
        magnitude = self._magnitude(self._half(values)) << self._shift
        return magnitude.view(torch.float16).float().mul_(1 / self._factor).copysign_(values)

    def encode(self, values: Tensor) -> Tensor:
        """Codes of the nearest numbers, uint8 for float32."""
        half = self._half(values)
        return (self._magnitude(half) | (half < 0).to(torch.int16) << self._sign).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """What codes stand for, float32 for uint8."""
        wide = codes.to(torch.int16)
        magnitude = (wide & (1 << self._sign) - 1) << self._shift
        half = magnitude | (wide >> self._sign) << 15
        return half.view(torch.float16).float().mul_(1 / self._factor)

    def _half(self, values: Tensor) -> Tensor:
        return (values * self._factor).half().view(torch.int16)

    def _magnitude(self, half: Tensor) -> Tensor:
        """The code without its sign, int16."""
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
