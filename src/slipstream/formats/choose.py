"""Select the weight format for a configuration's settings, or raise with the reason why none fits."""

from __future__ import annotations

from dataclasses import replace

from slipstream.errors import ConfigError
from slipstream.formats.bf13 import BF13
from slipstream.formats.fp6 import FP6, FP6_E3M2
from slipstream.formats.fp8 import FP8
from slipstream.formats.int4 import INT4, INT4_VARIANTS, int4
from slipstream.formats.int8 import INT8
from slipstream.formats.plain import PLAIN
from slipstream.formats.weight_format import Format
from slipstream.ops.linear import Rounding

__all__ = ["FORMATS", "VARIANTS", "format_of", "rounding_inputs"]

FORMATS: dict[str, Format] = {f.name: f for f in (PLAIN, INT8, INT4, FP8, FP6, BF13)}
"""The plain format, and each packed format in its default variant, by name."""

VARIANTS: dict[str, Format] = {f.name: f for f in (*INT4_VARIANTS, FP6_E3M2)}
"""Other variants of these, by name: int4 with other groups or without a minimum, fp6 with other fields."""

FP8_ABOVE = 128
"""Inputs are rounded to fp8 only for products of more rows than this: those are compute-bound, and fp8 has
twice the arithmetic rate. With fewer rows rounding would only lose precision."""

_BY_BITS = {8: "int8", 4: "int4", 6: "fp6"}
_GROUPS = (128, 64, 32)


def format_of(
    name: str | None,
    num_bits: int = 8,
    q_groups: int = 1,
    q_type: str | None = None,
    *,
    width: int | None = None,
) -> Format:
    """Return the format that a configuration requests.

    DeepSpeed's `q_groups` is the number of groups in a row of the model's hidden width. 1 (its default) means
    the format's own groups; more than one makes groups of `width / q_groups` inputs, in every matrix.

    Args:
        name: `quant.weight.format`, a key of `FORMATS` or `VARIANTS`; None takes it from `num_bits`.
        num_bits: 8, 4 or 6.
        q_groups: The number of groups in a row of `width` inputs.
        q_type: "symmetric" or "asymmetric" if requested; None for the format's default.
        width: The model's hidden width, if known.

    Raises:
        ConfigError: No format has this combination of bits, groups and type.
    """
    known = FORMATS | VARIANTS
    name = name or _BY_BITS.get(num_bits)
    if name not in known:
        raise ConfigError(f"no weight format has {num_bits} bits; num_bits is 4, 6 or 8")
    base = known[name]
    if not name.startswith("int4"):
        if q_groups != 1:
            scales = f"groups of {base.group} inputs" if base.group else "one scale per row"
            raise ConfigError(
                f"q_groups={q_groups} does not go with {name}, which has {scales}; leave "
                'q_groups at 1, or use format="int4"'
            )
        if q_type == "asymmetric":
            raise ConfigError(
                f'q_type="asymmetric" does not go with {name}, which has no zero point; leave q_type out, '
                'or use format="int4"'
            )
        return base
    group = base.group if q_groups == 1 else _group(q_groups, width)
    symmetric = base.name.endswith("-sym") if q_type is None else q_type == "symmetric"
    variant = int4(group, symmetric=symmetric)
    return known[variant.name]


def rounding_inputs(
    packed: Format, *, symmetric: bool = True, groups: int = 1, width: int | None = None
) -> Format:
    """Return the format for matrices whose input rows are rounded to 8 bits.

    Args:
        packed: `int8`, an `int4` variant or `fp8`; its packing functions may be replaced by faster ones.
        symmetric: Without a zero point.
        groups: The number of groups in a row, each with its own scale.
        width: The model's hidden width, if known.

    Raises:
        ConfigError: `groups` does not divide the hidden width.
    """
    if groups > 1 and width is not None and width % groups:
        divisor = next(n for n in range(min(groups, width), 0, -1) if width % n == 0)
        raise ConfigError(
            f"activation.q_groups={groups} does not divide rows of {width} inputs (the config's hidden "
            f"width); {f'use {divisor} or 1' if divisor > 1 else 'leave it at 1'}"
        )
    in_fp8 = packed.name == "fp8"
    rounding = Rounding(codes="fp8", above=FP8_ABOVE) if in_fp8 else Rounding(symmetric, groups)
    return replace(packed, name=packed.name + rounding.suffix, rounding=rounding)


def _group(q_groups: int, width: int | None) -> int:
    if width is None:
        raise ConfigError(
            f"q_groups={q_groups} divides rows of the hidden width, which the model's config lacks; "
            "leave it at 1"
        )
    if width % q_groups or width // q_groups not in _GROUPS:
        counts = [width // group for group in _GROUPS if width % group == 0 and width > group]
        advice = f"use {', '.join(map(str, counts))} or 1" if counts else "leave it at 1"
        raise ConfigError(
            f"q_groups={q_groups} makes groups of {width / q_groups:g} in rows of {width} inputs (the "
            f"config's hidden width), and int4 has groups of 32, 64 or 128; {advice}"
        )
    return width // q_groups
