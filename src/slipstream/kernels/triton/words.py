"""Weight formats by words of four bytes, inside of kernels; `slipstream.formats` draws the bytes.

A row's time is that of its integer operations, of which a processor does half as many as of products: so
bits are placed into a float by as few of them as there are. An integer becomes the mantissa of a float where
it stands, by one operation of logic; fields that are floats themselves go two at a time into a pair of
float16.

`HAND` takes the one instruction that the compiler does not find by itself; without it the same numbers come
out.

Source: NVIDIA PTX ISA, `lop3` and `cvt`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "FIELDS",
    "INTEGERS",
    "PAIRED",
    "PER_WORD",
    "dots",
    "field_at",
    "fixed",
    "nothing",
    "paired",
    "pairs",
    "rescale_of",
]

FIELDS = {0: 1, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4}
"""Weights of one part that a word holds; of dense matrices a word is one weight."""

PER_WORD = {0: 1, 1: 4, 2: 4, 3: 8, 4: 8, 5: 16, 6: 16}
"""Inputs that a word, with what belongs to it in other planes, stands for."""

INTEGERS = (1, 3, 4)
"""Formats whose codes are integers, which can be multiplied four at a time."""

PAIRED = (2, 5, 6)
"""Formats whose codes are small floats, which can be multiplied two at a time in float16."""


@triton.jit
def nothing():
    """A tuple to begin with, of which type checkers believe that it can grow."""
    return ()


@triton.jit
def _shifted(word, BY: tl.constexpr):
    """Bits moved up by BY, or down where it is negative."""
    return word << BY if BY >= 0 else word >> -BY


@triton.jit
def _by_asm(TEXT: tl.constexpr, word):
    """What one instruction makes of a word: 32 bits of 32."""
    return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _placed(
    word, PLACE: tl.constexpr, MASK: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, HAND: tl.constexpr
):  # fmt: skip
    """A field at bit PLACE, less BIAS, as float32: `MASK` has its bits, `FLIP` those that are inverted first.

    It stays at its bit, or 16 below where it would reach the exponent, which is chosen so that its lowest bit
    counts one.
    """
    low: tl.constexpr = PLACE if PLACE < 16 else PLACE - 16
    onto: tl.constexpr = (0x4B000000 - (low << 23)) | (FLIP << low)
    moved = _shifted(word, low - PLACE)
    if HAND:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", [moved, MASK << low, onto],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = (moved & (MASK << low)) ^ onto
    return bits.to(tl.float32, bitcast=True) - ((1 << (23 - low)) + BIAS)


@triton.jit
def _half(pair, UPPER: tl.constexpr, HAND: tl.constexpr):
    """One of a pair of float16, as float32."""
    if HAND and UPPER:
        found = _by_asm("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", pair)
        found = found.to(tl.float32, bitcast=True)
    else:
        if UPPER:
            pair = pair >> 16
        found = pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def _fp8_pair(word, PAIR: tl.constexpr, HAND: tl.constexpr):
    """What bytes 2 PAIR and the next stand for; without the hardware 2^-8 times that of PAIR and PAIR + 2."""
    if HAND:
        two = _shifted(word, -16 * PAIR).to(tl.uint16)
        pair = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [two], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        up: tl.constexpr = 8 * (1 - PAIR)
        pair = (_shifted(word, up) & 0x80008000) | (_shifted(word, up - 1) & 0x3F803F80)
    return pair


@triton.jit
def _fp8_at(word, BYTE: tl.constexpr, HAND: tl.constexpr):
    """By the hardware what the code stands for, else 2^-8 times that."""
    if HAND:
        found = _half(_fp8_pair(word, BYTE // 2, HAND), BYTE % 2 == 1, HAND)
    else:
        found = _half(_fp8_pair(word, BYTE % 2, HAND), BYTE >= 2, HAND)
    return found


@triton.jit
def _fp6_pair(low, high, PART: tl.constexpr, PAIR: tl.constexpr, E3M2: tl.constexpr):
    """Bytes PAIR and PAIR + 2 of the 6-bit codes of one part, two float16.

    `low` holds parts 2n and 2n + 1, `high` all four.
    """
    odd: tl.constexpr = 8 * PAIR
    more: tl.constexpr = 1 if E3M2 else 0
    pair = _shifted(low, 7 + more - odd - 4 * (PART % 2)) & (0x07800780 << more)
    pair = pair | (_shifted(high, 11 + more - odd - 2 * PART) & (0x08000800 << more))
    return pair | (_shifted(high, 14 - odd - 2 * PART) & 0x80008000)


@triton.jit
def _fp6_at(low, high, PART: tl.constexpr, BYTE: tl.constexpr, E3M2: tl.constexpr, HAND: tl.constexpr):
    return _half(_fp6_pair(low, high, PART, BYTE % 2, E3M2), BYTE >= 2, HAND)


@triton.jit
def field_at(
    word, other, high, PART: tl.constexpr, BYTE: tl.constexpr, FORMAT: tl.constexpr, HAND: tl.constexpr
):  # fmt: skip
    """Weights of byte BYTE and part PART of some words, float32; of int4 its codes, from zero on.

    Of fp6, `word` holds the nibbles of parts 0 and 1, `other` those of 2 and 3, `high` the upper two bits.
    """
    if FORMAT == 0:
        weight = word.to(tl.float32)
    elif FORMAT == 1:
        weight = _placed(word, 8 * BYTE, 0xFF, 0x80, 128, HAND)
    elif FORMAT == 2:
        weight = _fp8_at(word, BYTE, HAND)
    elif FORMAT <= 4:
        weight = _placed(word, 4 * PART + 8 * BYTE, 15, 0, 0, HAND)
    else:
        weight = _fp6_at(word if PART < 2 else other, high, PART, BYTE, FORMAT == 6, HAND)
    return weight


@triton.jit
def _quarters(word):
    """Words 0, 2, 1 and 3 of each run of four: what one thread loads at once."""
    even, odd = tl.split(tl.reshape(word, word.shape[:-1] + [word.shape[-1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, third, second, fourth


@triton.jit
def _largest(fields, COUNT: tl.constexpr):
    """Largest magnitude of a row; infinite where a number is none, so that zero times it is none, too.

    Threads meet once: every such meeting keeps a program from its weights for a tenth of a microsecond.
    """
    most = tl.zeros(fields[0].shape, tl.float32)
    for index in tl.static_range(COUNT):
        one = fields[index]
        most = tl.maximum(most, tl.where(one == one, tl.abs(one), float("inf")))
    return tl.max(most)


@triton.jit
def fixed(fields, PARTS: tl.constexpr):
    """A row as integers of 24 bits in three bytes each, four inputs to a word, and what one of them counts.

    That is as exact as float32 beside the row's largest number. Returned are, for each part, the upper
    (signed), middle and lower bytes of each quarter (`_quarters`), `(W / 4,)` int32.
    """
    most = _largest(fields, PARTS * 4)
    # A step and a half less than 2^23, for the largest is rounded, too; a number that is none stays none.
    most = tl.maximum(most, 1e-30)
    one = most / 8388606.0
    each = 8388606.0 / most
    words = nothing()
    for part in tl.static_range(PARTS):
        upper = tl.zeros(fields[0].shape, tl.int32)
        middle = tl.zeros(fields[0].shape, tl.int32)
        lower = tl.zeros(fields[0].shape, tl.int32)
        for byte in tl.static_range(4):
            number = tl.floor(fields[part * 4 + byte] * each + 0.5).to(tl.int32)
            upper |= ((number >> 16) & 255) << (8 * byte)
            middle |= ((number >> 8) & 255) << (8 * byte)
            lower |= (number & 255) << (8 * byte)
        words = words + _quarters(upper) + _quarters(middle) + _quarters(lower)  # noqa: RUF005
    return words, one + most * 0.0


@triton.jit
def _dot4(word, other, onto, SIGNED: tl.constexpr, HAND: tl.constexpr):
    """`onto` and the products of four signed bytes of a word with four bytes of another, int32."""
    if HAND and SIGNED:
        found = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [word, other, onto],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif HAND:
        found = tl.inline_asm_elementwise(
            "dp4a.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [word, other, onto],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = onto
        for byte in tl.static_range(4):
            weight = (word << (24 - 8 * byte)) >> 24
            number = (other << (24 - 8 * byte)) >> 24
            if not SIGNED:
                number = number & 255
            found += weight * number
    return found


@triton.jit
def dots(word, fixed_row, PARTS: tl.constexpr, HAND: tl.constexpr):
    """Words `(O, W)` of integers times a row as `fixed` makes it, summed over each run: `(O, W / 4)` float32.

    Sums are exact: a run's are below 2^22 for each byte.
    """
    quarters = _quarters(word)
    total = tl.zeros(quarters[0].shape, tl.float32)
    for place in tl.static_range(3):
        found = tl.zeros(quarters[0].shape, tl.int32)
        for part in tl.static_range(PARTS):
            for quarter in tl.static_range(4):
                codes = quarters[quarter]
                if PARTS == 2:
                    codes = (codes >> (4 * part)) & 0x0F0F0F0F
                numbers = fixed_row[part * 12 + place * 4 + quarter]
                found = _dot4(codes, tl.broadcast_to(numbers[None, :], codes.shape), found, place == 0, HAND)
        total = total * 256.0 + found.to(tl.float32)
    return total


@triton.jit
def _packed(low, high):
    """Two blocks of float32, rounded to float16, as one of 32 bits."""
    low = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def paired(fields, PARTS: tl.constexpr, FORMAT: tl.constexpr, HAND: tl.constexpr):
    """A row as pairs of float16 in the order of the weights', two for each part, and what they must be times.

    They are as large as sums of eight products leave room for: a number that is rounded here is off by 2^-12
    of itself, where a model in bfloat16 would round it to 2^-9.
    """
    most = _largest(fields, PARTS * 4)
    # Weights are at most 448 as they are, 1.75 where they are placed; of fp6 28 * 2^-12.
    room: tl.constexpr = 32768.0 if FORMAT >= 5 else 16.0 if HAND else 4096.0
    most = tl.maximum(most, 1e-30)
    one = most / room
    each = room / most
    found = nothing()
    for part in tl.static_range(PARTS):
        for pair in tl.static_range(2):
            if FORMAT == 2 and HAND:
                both = _packed(fields[part * 4 + 2 * pair] * each, fields[part * 4 + 2 * pair + 1] * each)
            else:
                both = _packed(fields[part * 4 + pair] * each, fields[part * 4 + pair + 2] * each)
            found = found + (both,)  # noqa: RUF005
    return found, one + most * 0.0


@triton.jit
def _onto(pair, other, onto, HAND: tl.constexpr):
    """`onto` and the products of two pairs of float16, rounded once."""
    if HAND:
        found = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [pair, other, onto],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = _half(pair, False, HAND) * _half(other, False, HAND) + _half(onto, False, HAND)
        high = _half(pair, True, HAND) * _half(other, True, HAND) + _half(onto, True, HAND)
        found = _packed(low, high)
    return found


@triton.jit
def pairs(
    word, other, high, row, PARTS: tl.constexpr, FORMAT: tl.constexpr, HAND: tl.constexpr
):  # fmt: skip
    """Words `(O, W)` of small floats times a row as `paired` makes it: float32, by words, of fp8 by runs.

    Eight products at a time are summed in float16.
    """
    if FORMAT == 2:
        words = _quarters(word)
        sums = tl.zeros(words[0].shape, tl.uint32)
        for pair in tl.static_range(2):
            numbers = _quarters(row[pair])
            for quarter in tl.static_range(4):
                number = tl.broadcast_to(numbers[quarter][None, :], words[0].shape)
                sums = _onto(_fp8_pair(words[quarter], pair, HAND), number, sums, HAND)
    else:
        sums = tl.zeros(word.shape, tl.uint32)
        for part in tl.static_range(PARTS):
            for pair in tl.static_range(2):
                weights = _fp6_pair(word if part < 2 else other, high, part, pair, FORMAT == 6)
                number = tl.broadcast_to(row[part * 2 + pair][None, :], word.shape)
                sums = _onto(weights, number, sums, HAND)
    return _half(sums, False, HAND) + _half(sums, True, HAND)


def rescale_of(kind: int, rescale: float, *, hand: bool) -> float:
    """What a field must be multiplied by: what `decode.RESCALE` says, unless the hardware has decoded it."""
    return 1.0 if hand and kind == 2 else rescale
