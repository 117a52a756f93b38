"""Decodes fields of packed bytes to pairs of 16-bit floats for the matrix units, by NVIDIA's instructions.

Four bytes at a time: bits are moved within all four bytes at once, and one permutation makes two floats out
of two bytes. The error of the exponent is then corrected by a product, which is exact, or an integer's offset
is subtracted.

Source: NVIDIA PTX ISA, `prmt` and `fma`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from slipstream.kernels.triton.words import nothing

__all__ = ["fields_of"]


class _Kind(NamedTuple):
    """A 16-bit float.

    Attributes:
        pair: The PTX type of two of them in a register.
        mantissa: Number of mantissa bits.
        bias: Bias of the exponent.
    """

    pair: str
    mantissa: int
    bias: int

    def two(self, value: float) -> str:
        """Return the word that holds a number twice; the number must fit into the mantissa's bits."""
        fraction, exponent = math.frexp(abs(value))
        bits = self.bias + exponent - 1 << self.mantissa
        bits += round(math.ldexp(fraction * 2 - 1, self.mantissa)) | (value < 0) << 15
        return str(bits * 0x00010001)


class _Piece(NamedTuple):
    """Some bits of each of four bytes in a register, and their position in a float."""

    register: str
    source: int
    target: int
    bits: int


_BF16, _FP16 = _Kind("bf16x2", 7, 127), _Kind("f16x2", 10, 15)
_HALVES = ((0, "0x5140"), (1, "0x7362"))
"""For each pair of four floats: the permutation that joins their lower and upper bytes from two registers."""


def _text(*lines: str) -> tl.constexpr:
    registers = ".reg .b32 low, high, some, pair, times, less;"
    return tl.constexpr("\n".join(("{", registers, *lines, "}")))


def _moved(pieces: list[_Piece], into: str, first: int) -> str:
    """Return code that gathers bits `first` to `first + 7` of four floats in a register."""
    text = f"mov.b32 {into}, 0;"
    for register, source, target, bits in pieces:
        begin, end = max(target, first), min(target + bits, first + 8)
        if begin < end:
            by = target - first - source
            mask = ((1 << end - begin) - 1 << begin - first) * 0x01010101
            text += f"{'shl' if by >= 0 else 'shr'}.b32 some, {register}, {abs(by)};"
            text += f"and.b32 some, some, {mask}; or.b32 {into}, {into}, some;"
    return text


def _integers(kind: _Kind) -> tl.constexpr:
    """Return code for signed bytes; in float16 they are added to 1024 + 128, which is then subtracted.

    A bfloat16 has seven mantissa bits: the lower seven bits of a byte are added to 128, from which 128 is
    subtracted, or 256 for negative numbers.
    """
    if kind is _FP16:
        return _text(
            f"mov.b32 times, {kind.two(1)}; mov.b32 less, {kind.two(-1152)};",
            "xor.b32 low, $2, 0x80808080; mov.b32 high, 0x64646464;",
            *(
                f"prmt.b32 pair, low, high, {order}; fma.rn.f16x2 ${half}, pair, times, less;"
                for half, order in _HALVES
            ),
        )
    return _text(
        f"mov.b32 times, {kind.two(-1)}; mov.b32 high, 0x43434343;",
        "and.b32 low, $2, 0x7F7F7F7F; and.b32 some, $2, 0x80808080;",
        *(
            f"prmt.b32 pair, low, high, {order}; prmt.b32 less, some, high, {order};"
            f" fma.rn.bf16x2 ${half}, less, times, pair;"
            for half, order in _HALVES
        ),
    )


def _nibbles(kind: _Kind, zero: int) -> tl.constexpr:
    """Return code for both nibbles of bytes, times a scale plus a minimum; `zero` is the code of zero."""
    upon = 2.0**kind.mantissa
    upper = int(kind.two(upon)) >> 8 & 255
    lines = [
        f"mov.b32 times, {kind.two(1)}; mov.b32 less, {kind.two(-upon - zero)};",
        f"mov.b32 high, {upper * 0x01010101};",
    ]
    for nibble in (0, 1):
        lines.append(f"shr.b32 some, $4, {4 * nibble}; and.b32 low, some, 0x0F0F0F0F;")
        lines += [
            f"prmt.b32 pair, low, high, {order}; fma.rn.{kind.pair} pair, pair, times, less;"
            f" fma.rn.{kind.pair} ${2 * nibble + half}, pair, ${5 + half}, ${7 + half};"
            for half, order in _HALVES
        ]
    return _text(*lines)


def _floats(kind: _Kind, pieces: list[list[_Piece]], bias: int, head: str) -> tl.constexpr:
    """Return code for small floats, whose bits are moved into larger ones, times scales in `$7` and `$8`.

    The difference of the biases is corrected by a product first in float16; in bfloat16 the scales include
    their share of it.
    """
    # The zero that is added is negative, or minus zero would lose its sign.
    lines = [head, "mov.b32 less, 0x80008000;"]
    first = ""
    if kind is _FP16:
        lines.append(f"mov.b32 times, {kind.two(2.0 ** (kind.bias - bias))};")
        first = f"fma.rn.{kind.pair} pair, pair, times, less;"
    for field, bits in enumerate(pieces):
        lines += [_moved(bits, "low", 0), _moved(bits, "high", 8)]
        lines += [
            f"prmt.b32 pair, low, high, {order}; {first}"
            f" fma.rn.{kind.pair} ${2 * field + half}, pair, ${7 + half}, less;"
            for half, order in _HALVES
        ]
    return _text(*lines)


def _fp8(kind: _Kind) -> tl.constexpr:
    """Return code for e4m3: a byte becomes the upper half of a float, and all bits but its sign move down."""
    down = 8 - (kind.mantissa - 3)
    return _text(
        f"mov.b32 times, {kind.two(2.0 ** (kind.bias - 7))}; mov.b32 less, 0x80008000; mov.b32 high, 0;",
        *(
            f"prmt.b32 some, $2, high, {order}; shr.b32 pair, some, {down};"
            f" and.b32 pair, pair, {(0x7F00 >> down) * 0x00010001}; and.b32 some, some, 0x80008000;"
            f" or.b32 pair, pair, some; fma.rn.{kind.pair} ${half}, pair, times, less;"
            for half, order in ((0, "0x1404"), (1, "0x3424"))
        ),
    )


def _fp6(kind: _Kind, mantissa: int, bias: int) -> tl.constexpr:
    """Return code for fp6: nibbles in `$4`, upper bits in lower nibbles of `$5` or upper ones of `$6`."""
    up = kind.mantissa - mantissa
    pieces = [
        [
            _Piece("$4", 4 * nibble, up, 4),
            _Piece("upper", 2 * nibble, up + 4, 1),
            _Piece("upper", 2 * nibble + 1, 15, 1),
        ]
        for nibble in (0, 1)
    ]
    return _floats(kind, pieces, bias, ".reg .b32 upper; shr.b32 upper, $6, 4; or.b32 upper, upper, $5;")


INT8_BF16, INT8_FP16 = _integers(_BF16), _integers(_FP16)
FP8_BF16, FP8_FP16 = _fp8(_BF16), _fp8(_FP16)
INT4_BF16, INT4_FP16 = _nibbles(_BF16, 0), _nibbles(_FP16, 0)
INT4_SYM_BF16, INT4_SYM_FP16 = _nibbles(_BF16, 8), _nibbles(_FP16, 8)
E2M3_BF16, E2M3_FP16 = _fp6(_BF16, 3, 1), _fp6(_FP16, 3, 1)
E3M2_BF16, E3M2_FP16 = _fp6(_BF16, 2, 3), _fp6(_FP16, 2, 3)


@triton.jit
def _one(TEXT: tl.constexpr, codes, BF16: tl.constexpr):
    if BF16:
        weights = tl.inline_asm_elementwise(TEXT, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        weights = tl.inline_asm_elementwise(TEXT, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    return weights


@triton.jit
def _two(TEXT: tl.constexpr, given, REGISTERS: tl.constexpr, BF16: tl.constexpr):
    if BF16:
        low, upper = tl.inline_asm_elementwise(
            TEXT, REGISTERS, given, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, upper = tl.inline_asm_elementwise(
            TEXT, REGISTERS, given, dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, upper


@triton.jit
def fields_of(codes, even, odd, scale, minimum, FORMAT: tl.constexpr, BF16: tl.constexpr):
    """Decode the weights of each field of some bytes: a tuple of 16-bit float blocks shaped like `codes`.

    Args:
        codes: Bytes of the first plane.
        even: For fp6, bytes of the second plane whose lower nibbles belong to these codes, or zero.
        odd: For fp6, bytes of the second plane whose upper nibbles belong to these codes, or zero.
        scale: For int4 and fp6, the scale of each byte, in bfloat16 or float16; for fp6 in bfloat16 including
            the part of the correction that is applied here, for exponents 126 (e2m3) or 124 (e3m2) too small.
        minimum: The minimum of each byte, in the dtype of `scale`; zero where there is none.
        FORMAT: A format number other than 0.
        BF16: Whether weights become bfloat16, else float16.
    """
    if FORMAT == 1:
        weights = nothing() + (_one(INT8_BF16 if BF16 else INT8_FP16, codes, BF16),)  # noqa: RUF005
    elif FORMAT == 2:
        weights = nothing() + (_one(FP8_BF16 if BF16 else FP8_FP16, codes, BF16),)  # noqa: RUF005
    elif FORMAT == 3:
        given = [codes, scale, minimum]
        weights = _two(INT4_BF16 if BF16 else INT4_FP16, given, "=r,=r,=r,=r,r,r,r,r,r", BF16)
    elif FORMAT == 4:
        given = [codes, scale, minimum]
        weights = _two(INT4_SYM_BF16 if BF16 else INT4_SYM_FP16, given, "=r,=r,=r,=r,r,r,r,r,r", BF16)
    elif FORMAT == 5:
        given = [codes, even, odd, scale]
        weights = _two(E2M3_BF16 if BF16 else E2M3_FP16, given, "=r,=r,=r,=r,r,r,r,r,r", BF16)
    else:
        given = [codes, even, odd, scale]
        weights = _two(E3M2_BF16 if BF16 else E3M2_FP16, given, "=r,=r,=r,=r,r,r,r,r,r", BF16)
    return weights
