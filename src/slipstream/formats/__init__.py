"""Weight formats: each file packs a dense matrix into planes, unpacks it, and states its error bound."""

from __future__ import annotations

from slipstream.formats.plain import PLAIN
from slipstream.formats.weight_format import Format

__all__ = ["FORMATS", "Format"]

FORMATS: dict[str, Format] = {PLAIN.name: PLAIN}
"""Every format by name."""
