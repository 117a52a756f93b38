"""Decodes weight formats by words of four bytes, inside kernels; `slipstream.formats` documents the bytes.

A row's time is that of its integer operations, of which a multiprocessor does half as many as products: so
bits are placed into floats with as few of them as possible. An integer becomes the mantissa of a float in
place, by one logic operation; fields that are floats themselves go two at a time into a pair of float16.

`HAND` uses the single instruction that the compiler does not find by itself; without it the results are the
same.

Source: NVIDIA PTX ISA, `lop3` and `cvt`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTEGERS",
    "PAIRED",
    "PER_WORD",
    "dots",
    "field_at",
    "fixed",
    "nothing",
    "paired",
    "pairs",
    "quarters",
    "rescale_of",
    "taken",
]

PER_WORD = {0: 1, 1: 4, 2: 4, 3: 8, 4: 8, 5: 8, 6: 8}
"""Inputs that a word holds, together with its bits in other planes, by format number."""

INTEGERS = (1, 3, 4)
"""Formats whose codes are integers, which can be multiplied four at a time."""

PAIRED = (2, 5, 6)
"""Formats whose codes are small floats, which can be multiplied two at a time in float16."""


@triton.jit
def nothing():
    """Return an empty tuple to append to, for which type checkers accept that it grows."""
    return ()


@triton.jit
def _shifted(word, BY: tl.constexpr):
    """Shift bits up by BY, or down where it is negative."""
    return word << BY if BY >= 0 else word >> -BY


@triton.jit
def _by_asm(TEXT: tl.constexpr, word):
    """Apply one instruction, from 32 bits to 32 bits, to each word."""
    return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _placed(
    word, PLACE: tl.constexpr, MASK: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, HAND: tl.constexpr
):  # fmt: skip
    """Return the field at bit PLACE, minus BIAS, as float32; the bits in `FLIP` of `MASK` are inverted first.

    The field stays at its bit, or 16 below where it would overlap the exponent; the exponent is chosen so
    that the field's lowest bit counts one.
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
    """Return one of a pair of float16 as float32."""
    if HAND and UPPER:
        number = _by_asm("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", pair)
        number = number.to(tl.float32, bitcast=True)
    else:
        if UPPER:
            pair = pair >> 16
        number = pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _converted(word, PAIR: tl.constexpr, E5M2: tl.constexpr):
    """Convert bytes 2 PAIR and 2 PAIR + 1 with the hardware, to two float16."""
    two = _shifted(word, -16 * PAIR).to(tl.uint16)
    if E5M2:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.e5m2x2 $0, $1;", "=r,h", [two], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [two], dtype=tl.uint32, is_pure=True, pack=1
        )
    return pair


@triton.jit
def _fp8_pair(word, PAIR: tl.constexpr, HAND: tl.constexpr):
    """Decode bytes 2 PAIR and the next; without the hardware PAIR and PAIR + 2, to 2^-8 of their values."""
    if HAND:
        pair = _converted(word, PAIR, False)
    else:
        up: tl.constexpr = 8 * (1 - PAIR)
        pair = (_shifted(word, up) & 0x80008000) | (_shifted(word, up - 1) & 0x3F803F80)
    return pair


@triton.jit
def _fp8_at(word, BYTE: tl.constexpr, HAND: tl.constexpr):
    """Return the value of a code as the hardware decodes it, else 2^-8 times the value."""
    if HAND:
        weight = _half(_fp8_pair(word, BYTE // 2, HAND), BYTE % 2 == 1, HAND)
    else:
        weight = _half(_fp8_pair(word, BYTE % 2, HAND), BYTE >= 2, HAND)
    return weight


@triton.jit
def _fp6_pair(low, high, PART: tl.constexpr, PAIR: tl.constexpr, E3M2: tl.constexpr):
    """Return bytes PAIR and PAIR + 2 of the 6-bit codes of one of four parts, as two float16."""
    odd: tl.constexpr = 8 * PAIR
    wider: tl.constexpr = 1 if E3M2 else 0
    pair = _shifted(low, 7 + wider - odd - 4 * (PART % 2)) & (0x07800780 << wider)
    pair = pair | (_shifted(high, 11 + wider - odd - 2 * PART) & (0x08000800 << wider))
    return pair | (_shifted(high, 14 - odd - 2 * PART) & 0x80008000)


@triton.jit
def _fp6_bytes(low, high, PART: tl.constexpr):
    """Return four 6-bit codes of one of four parts as bytes: e2m3 as e4m3, and e3m2 as e5m2.

    As the exponents are wider, these have 2^-6 and 2^-12 of the values of the codes.
    """
    # One product moves a code's uppermost bit and its sign, which are adjacent, to bits 4 and 7 of its byte.
    down: tl.constexpr = 2 if PART == 3 else 0
    place: tl.constexpr = 2 * PART - down
    bits = (_shifted(high, -down) & (0x03030303 << place)) * (0x50 >> place)
    return (_shifted(low, -4 * (PART % 2)) & 0x0F0F0F0F) | (bits & 0x90909090)


@triton.jit
def _fp6_at(low, high, PART: tl.constexpr, BYTE: tl.constexpr, E3M2: tl.constexpr, HAND: tl.constexpr):
    return _half(_fp6_pair(low, high, PART, BYTE % 2, E3M2), BYTE >= 2, HAND)


@triton.jit
def field_at(word, high, PART: tl.constexpr, BYTE: tl.constexpr, FORMAT: tl.constexpr, HAND: tl.constexpr):
    """Return the weights of byte BYTE and part PART of some words, float32; for int4 the unsigned codes.

    For fp6, `word` holds the lower four bits of PART and its neighbour, `high` the upper two of all four.
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
        weight = _fp6_at(word, high, PART, BYTE, FORMAT == 6, HAND)
    return weight


@triton.jit
def quarters(word):
    """Return the four words of each run, `(..., W / 4)` each; a thread loads a run at once."""
    even, odd = tl.split(tl.reshape(word, word.shape[:-1] + [word.shape[-1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def taken(word, high, FORMAT: tl.constexpr):
    """Return the words that a thread takes, of one run or two, and those of the other plane: two tuples."""
    if FORMAT < 5:
        words = quarters(word)
        highs = words
    else:
        runs = quarters(tl.reshape(word, word.shape[:-1] + [word.shape[-1] // 8, 8]))
        first, fifth = tl.split(runs[0])
        second, sixth = tl.split(runs[1])
        third, seventh = tl.split(runs[2])
        fourth, eighth = tl.split(runs[3])
        words = (first, second, third, fourth, fifth, sixth, seventh, eighth)
        highs = quarters(high)
    return words, highs


@triton.jit
def _cast_four(fields, AT: tl.constexpr, each):
    """Return four inputs as 16-bit integers, two to a word.

    Once 1.5 * 2^23 is added, the lowest bits of a number are those of the nearest integer.
    """
    first = (fields[AT] * each + 12582912.0).to(tl.int32, bitcast=True)
    second = (fields[AT + 1] * each + 12582912.0).to(tl.int32, bitcast=True)
    third = (fields[AT + 2] * each + 12582912.0).to(tl.int32, bitcast=True)
    fourth = (fields[AT + 3] * each + 12582912.0).to(tl.int32, bitcast=True)
    return (first & 0xFFFF) | (second << 16), (third & 0xFFFF) | (fourth << 16)


@triton.jit
def _bytes_of(low, high, UPPER: tl.constexpr, HAND: tl.constexpr):
    """Return the lower or the upper bytes of two words with two 16-bit numbers each."""
    if HAND and UPPER:
        both = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    elif HAND:
        both = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        if UPPER:
            low, high = low >> 8, high >> 8
        both = (low & 0xFF) | ((low >> 8) & 0xFF00) | ((high & 0xFF) << 16) | ((high << 8) & -0x1000000)
    return both


@triton.jit
def fixed(fields, most, PARTS: tl.constexpr, HAND: tl.constexpr):
    """Return a row as 16-bit integers, split into bytes, four inputs to a word, and the value of one unit.

    A number is off by 2^-16 of the largest (`most`), whereas a model of 16 bits rounds the latter to 2^-9 or
    2^-12 of itself. Returned are the upper (signed) and the lower bytes of the first four inputs of the runs,
    of the next four, and so on, `(W / 4,)` int32 each.
    """
    # 32766 rather than 2^15 - 1, as the largest is rounded, too; NaN stays NaN.
    most = tl.maximum(most, 1e-30)
    unit = most / 32766.0
    each = 32766.0 / most
    words = nothing()
    for four in tl.static_range(4 * PARTS):
        low, high = _cast_four(fields, 4 * four, each)
        words = words + (_bytes_of(low, high, True, HAND), _bytes_of(low, high, False, HAND))  # noqa: RUF005
    return words, unit + most * 0.0


@triton.jit
def _dot4(word, other, onto, SIGNED: tl.constexpr, HAND: tl.constexpr):
    """Return `onto` plus the dot product of four signed bytes of a word and four bytes of another, int32."""
    if HAND and SIGNED:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [word, other, onto],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif HAND:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [word, other, onto],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = onto
        for byte in tl.static_range(4):
            weight = (word << (24 - 8 * byte)) >> 24
            number = (other << (24 - 8 * byte)) >> 24
            if not SIGNED:
                number = number & 255
            total += weight * number
    return total


@triton.jit
def dots(word, fixed_row, PARTS: tl.constexpr, HAND: tl.constexpr):
    """Multiply words `(O, W)` of integers by a row from `fixed`, summed over each run: `(O, W / 4)` float32.

    The sums are exact: those of a run are below 2^27.
    """
    words = quarters(word)
    total = tl.zeros(words[0].shape, tl.int32)
    for place in tl.static_range(2):
        total = total * 256
        for part in tl.static_range(PARTS):
            for quarter in tl.static_range(4):
                codes = words[quarter]
                if PARTS == 2:
                    codes = (codes >> (4 * part)) & 0x0F0F0F0F
                numbers = fixed_row[part * 8 + quarter * 2 + place]
                total = _dot4(codes, tl.broadcast_to(numbers[None, :], codes.shape), total, place == 0, HAND)
    return total.to(tl.float32)


@triton.jit
def _packed(low, high, HAND: tl.constexpr):
    """Round two blocks of float32 to float16 and pack them into one of 32-bit words."""
    if HAND:  # one instruction, where the compiler uses three of which two are slow
        both = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        low = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        both = low | (high.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return both


@triton.jit
def paired(
    fields, most, PARTS: tl.constexpr, FORMAT: tl.constexpr, HAND: tl.constexpr, CONVERTS: tl.constexpr
):  # fmt: skip
    """Return a row as pairs of float16 in the order of the weights' pairs, and the factor to multiply by.

    They are as large as sums of eight products leave room for: a number that is rounded here is off by 2^-12
    of itself, whereas a model in bfloat16 would round it to 2^-9.
    """
    # Weights are at most 448 where they are converted, 1.75 where they are placed; of fp6 28 * 2^-12.
    room: tl.constexpr = 32768.0 if FORMAT >= 5 else 16.0 if CONVERTS else 4096.0
    most = tl.maximum(most, 1e-30)
    unit = most / room
    each = room / most
    row = nothing()
    for four in tl.static_range(4 * PARTS):
        for pair in tl.static_range(2):
            if CONVERTS:
                low, high = fields[4 * four + 2 * pair], fields[4 * four + 2 * pair + 1]
            else:
                low, high = fields[4 * four + pair], fields[4 * four + pair + 2]
            both = _packed(low * each, high * each, HAND)
            row = row + (both,)  # noqa: RUF005
    return row, unit + most * 0.0


@triton.jit
def _onto(pair, other, onto, HAND: tl.constexpr):
    """Return `onto` plus the products of two pairs of float16, rounded once."""
    if HAND:
        sums = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [pair, other, onto],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = _half(pair, False, HAND) * _half(other, False, HAND) + _half(onto, False, HAND)
        high = _half(pair, True, HAND) * _half(other, True, HAND) + _half(onto, True, HAND)
        sums = _packed(low, high, HAND)
    return sums


@triton.jit
def pairs(
    word, high, row, PARTS: tl.constexpr, FORMAT: tl.constexpr, HAND: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Multiply words `(O, W)` of small floats by a row from `paired`: float32, summed per thread.

    Eight products at a time are summed in float16.
    """
    words, highs = taken(word, high, FORMAT)
    total = tl.zeros(words[0].shape, tl.float32)
    sums = tl.zeros(words[0].shape, tl.uint32)
    # Both parts of a word are used before the next word.
    for at in tl.static_range(8 if PARTS == 4 else 4):
        for side in tl.static_range(2 if PARTS == 4 else 1):
            for pair in tl.static_range(2):
                if FORMAT == 2:
                    weights = _fp8_pair(words[at], pair, CONVERTS)
                elif CONVERTS:
                    codes = _fp6_bytes(words[at], highs[at % 4], at // 4 * 2 + side)
                    weights = _converted(codes, pair, FORMAT == 6)
                else:
                    weights = _fp6_pair(words[at], highs[at % 4], at // 4 * 2 + side, pair, FORMAT == 6)
                number = row[(at // 4 * 2 + side) * 8 + at % 4 * 2 + pair]
                number = tl.broadcast_to(number[None, :], sums.shape)
                sums = _onto(weights, number, sums, HAND)
        if PARTS == 1 and at == 3 or PARTS == 4 and at % 2 == 1:
            total += _half(sums, False, HAND) + _half(sums, True, HAND)
            sums = tl.zeros(words[0].shape, tl.uint32)
    return total


def rescale_of(kind: int, rescale: float, *, hand: bool) -> float:
    """Return what a field must be multiplied by: `decode.RESCALE`, unless the hardware has decoded it.

    The hardware reads e2m3 codes as e4m3, with exponents 6 too small, and e3m2 as e5m2, 12 too small.
    """
    return {2: 1.0, 5: 2.0**6, 6: 2.0**12}.get(kind, rescale) if hand else rescale
