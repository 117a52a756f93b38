"""Decodes weight formats to float32 blocks, inside kernels; `slipstream.formats` documents the bytes.

Every code becomes a number by placing its bits into a wider float, which costs two or three operations;
integer conversions run at a quarter of their rate. The error of the placed exponent is in `RESCALE`, by which
the row's multiplier corrects it.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["FORMATS", "PARTS", "RESCALE", "codes_at", "decoded", "group_at", "kind_of", "name_of"]

FORMATS = {"plain": 0, "int8": 1, "fp8": 2, "int4": 3, "int4-sym": 4, "fp6": 5, "fp6-e3m2": 6}
"""The number of each format in kernels; int4 in groups of 64 and 128 has the number of int4."""

PARTS = {0: 1, 1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 4}
"""Number of runs of consecutive inputs that the fields of one run of bytes hold, by format number."""

RESCALE = {0: 1.0, 1: 1.0, 2: 2.0**8, 3: 1.0, 4: 1.0, 5: 2.0**14, 6: 2.0**12}
"""Factor that a decoded number must be multiplied by, by format number."""


@triton.jit
def _small_integer(code, BIAS: tl.constexpr):
    """Convert unsigned codes below 2^8, minus the bias: they are the low bits of 2^23 + code."""
    return (code.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + BIAS)


@triton.jit
def _int8_codes(raw):
    """Decode int8 codes, loaded as uint8."""
    return _small_integer(raw ^ 0x80, 128.0)


@triton.jit
def _fp8_codes(raw):
    """Decode e4m3 codes to 2^-8 times their values."""
    bits = raw.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nibble(raw, HIGH: tl.constexpr, BIAS: tl.constexpr):
    """Decode the low or the high 4-bit codes of some bytes."""
    return _small_integer(raw >> 4 if HIGH else raw & 15, BIAS)


@triton.jit
def _fp6_part(low, high, PART: tl.constexpr, E3M2: tl.constexpr):
    """Decode the 6-bit codes of one part: `low` holds bits of parts 2n and 2n + 1, `high` of all four."""
    four = (low >> 4 if PART % 2 else low & 15).to(tl.uint16)
    code = four | (((high >> (2 * PART)) & 3).to(tl.uint16) << 4)
    shift: tl.constexpr = 8 if E3M2 else 7
    bits = ((code & 0x20) << 10) | ((code & 0x1F) << shift)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def codes_at(codes, second, own, run, there, inputs, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Load the stored bytes of some runs of some rows, three blocks `(OUTPUTS, G, WIDTH)`, for `decoded`.

    `own` is the offset of each row, `(OUTPUTS, 1, 1)`; `there` tells which runs exist, `(OUTPUTS, G)`.
    """
    lane = tl.arange(0, WIDTH)[None, None, :]
    at = run[None, :, None] * WIDTH + lane
    inside = there[:, :, None]
    if FORMAT <= 2:
        # Rows are not padded: bytes beyond the last input belong to the next row.
        inside = inside & (at < inputs)
    if FORMAT >= 5:
        nibbles = own * 2 + run[None, :, None] * (2 * WIDTH) + lane
        first = tl.load(codes + nibbles, mask=inside, other=0)
        other = tl.load(codes + nibbles + WIDTH, mask=inside, other=0)
        high = tl.load(second + own + at, mask=inside, other=0)
    else:
        first = tl.load(codes + own + at, mask=inside, other=0)
        other = first
        high = first
    return first, other, high


@triton.jit
def decoded(first, other, high, PART: tl.constexpr, FORMAT: tl.constexpr):
    """Decode the weights of part PART of what `codes_at` loaded, float32, without scale and minimum."""
    if FORMAT == 0:
        weights = first.to(tl.float32)
    elif FORMAT == 1:
        weights = _int8_codes(first)
    elif FORMAT == 2:
        weights = _fp8_codes(first)
    elif FORMAT <= 4:
        weights = _nibble(first, PART == 1, 8.0 if FORMAT == 4 else 0.0)
    else:
        weights = _fp6_part(first if PART < 2 else other, high, PART, FORMAT == 6)
    return weights


@triton.jit
def group_at(second, third, row, group, groups, there, FORMAT: tl.constexpr):
    """Load the scale and minimum of some groups of some rows, `(OUTPUTS, G)` float32 each."""
    at = row[:, None] * groups + group[None, :]
    scale = tl.load((third if FORMAT >= 5 else second) + at, mask=there, other=0.0).to(tl.float32)
    minimum = scale
    if FORMAT == 3:
        minimum = tl.load(third + at, mask=there, other=0.0).to(tl.float32)
    return scale, minimum


def name_of(kind: int) -> str:
    """Return the name of a format in `FORMATS`, given its number."""
    return next(name for name, number in FORMATS.items() if number == kind)


def kind_of(name: str) -> tuple[int, int] | None:
    """Return a format's number and the blocks of 32 inputs per group, or None for an unknown format."""
    if name == "fp8-a8":  # the same weights, but input rows are rounded where they are many
        name = "fp8"
    if name in ("int4", "int4-g64", "int4-g128"):
        return FORMATS["int4"], {"int4": 1, "int4-g64": 2, "int4-g128": 4}[name]
    if name.startswith("int4-") and name.endswith("-sym"):
        return FORMATS["int4-sym"], int(name.removeprefix("int4-g").removesuffix("-sym")) // 32
    return (FORMATS[name], 2 if name.startswith("fp6") else 1) if name in FORMATS else None
