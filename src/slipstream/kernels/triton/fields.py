"""Fields of packed bytes as pairs of 16-bit floats, by NVIDIA's own instructions; for matrix units.

Four bytes at a time: bits are moved within bytes, of four at once, and one permutation makes two floats of
two bytes. What an exponent is then off by is multiplied away, which is exact, or an integer's offset is
subtracted.

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
        pair: The name of two of them in a register.
        mantissa: Its bits.
        bias: Of its exponent.
    """

    pair: str
    mantissa: int
    bias: int

    def two(self, value: float) -> str:
        """A number that has no more bits than the mantissa, twice, as a word."""
        fraction, exponent = math.frexp(abs(value))
        bits = self.bias + exponent - 1 << self.mantissa
        bits += round(math.ldexp(fraction * 2 - 1, self.mantissa)) | (value < 0) << 15
        return str(bits * 0x00010001)


class _Piece(NamedTuple):
    """Some bits of each of four bytes in a register, and where they stand in a float."""

    register: str
    source: int
    target: int
    bits: int


_BF16, _FP16 = _Kind("bf16x2", 7, 127), _Kind("f16x2", 10, 15)
_HALVES = ((0, "0x5140"), (1, "0x7362"))
"""How the lower and upper bytes of two floats, of four in two registers, are put together."""


def _text(*lines: str) -> tl.constexpr:
    registers = ".reg .b32 low, high, some, pair, times, less;"
    return tl.constexpr("\n".join(("{", registers, *lines, "}")))


def _moved(pieces: list[_Piece], into: str, first: int) -> str:
    """What gathers bits `first` to `first + 7` of four floats in a register."""
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
    """Signed bytes, in float16 upon 1024 and 128, which are subtracted.

    A bfloat16 has seven bits: the lower ones stand upon 128, of which 128 is subtracted, or of negatives 256.
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
    """Both nibbles of bytes, times a scale, and a minimum added; `zero` is the code of nought."""
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
    """Small floats times the scales in `$7` and `$8`: their bits where those of the larger stand.

    What the biases differ by is multiplied away first where pairs are of float16; of bfloat16 scales bring
    their share of that.
    """
    # Nought that is added is negative, or minus nought would lose its sign.
    lines = [head, "mov.b32 less, 0x80008000;"]
    first = ""
    if kind is _FP16:
        lines.append(f"mov.b32 times, {kind.two(2.0 ** (kind.bias - bias))};")
        first = f"fma.rn.{kind.pair} pair, pair, times, less;"
    for field, some in enumerate(pieces):
        lines += [_moved(some, "low", 0), _moved(some, "high", 8)]
        lines += [
            f"prmt.b32 pair, low, high, {order}; {first}"
            f" fma.rn.{kind.pair} ${2 * field + half}, pair, ${7 + half}, less;"
            for half, order in _HALVES
        ]
    return _text(*lines)


def _fp8(kind: _Kind) -> tl.constexpr:
    """Bytes of e4m3: put into the upper halves of pairs, and all but their signs moved down."""
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
    """Of nibbles in `$4`, whose upper bits are in the lower nibbles of `$5` or in the upper ones of `$6`."""
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
        found = tl.inline_asm_elementwise(TEXT, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        found = tl.inline_asm_elementwise(TEXT, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    return found


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
    """The weights of each field of some bytes, a tuple of blocks like `codes` in 16 bits.

    Args:
        codes: Bytes of the first plane.
        even: Of fp6 bytes of the second whose lower nibbles belong to these, or nought.
        odd: Those whose upper nibbles do.
        scale: Of int4 and fp6, in bfloat16 or float16, for each byte; of fp6 in bfloat16 times what makes up
            for exponents that are 126 too small (e2m3), or 124 (e3m2), as far as it is made up for here.
        minimum: The same; nought where there is none.
        FORMAT: Not 0.
        BF16: Whether weights become bfloat16, else float16.
    """
    if FORMAT == 1:
        found = nothing() + (_one(INT8_BF16 if BF16 else INT8_FP16, codes, BF16),)  # noqa: RUF005
    elif FORMAT == 2:
        found = nothing() + (_one(FP8_BF16 if BF16 else FP8_FP16, codes, BF16),)  # noqa: RUF005
    elif FORMAT == 3:
        given = [codes, scale, minimum]
        found = _two(INT4_BF16 if BF16 else INT4_FP16, given, "=r,=r,=r,=r,r,r,r,r,r", BF16)
    elif FORMAT == 4:
        given = [codes, scale, minimum]
        found = _two(INT4_SYM_BF16 if BF16 else INT4_SYM_FP16, given, "=r,=r,=r,=r,r,r,r,r,r", BF16)
    elif FORMAT == 5:
        given = [codes, even, odd, scale]
        found = _two(E2M3_BF16 if BF16 else E2M3_FP16, given, "=r,=r,=r,=r,r,r,r,r,r", BF16)
    else:
        given = [codes, even, odd, scale]
        found = _two(E3M2_BF16 if BF16 else E3M2_FP16, given, "=r,=r,=r,=r,r,r,r,r,r", BF16)
    return found
