"""Weight formats: each file packs a dense matrix into planes, unpacks it, and states its error bound."""

from __future__ import annotations

from slipstream.formats.choose import FORMATS, VARIANTS, format_of, rounding_inputs
from slipstream.formats.weight_format import Format

__all__ = ["FORMATS", "VARIANTS", "Format", "format_of", "rounding_inputs"]
