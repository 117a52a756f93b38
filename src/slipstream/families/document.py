"""Renders the registry of families as markdown: a table for the docs, a summary for the README."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.families.family import Family

__all__ = ["render", "summary"]


def render(families: Iterable[Family]) -> str:
    """Return a table with a row per family: its name, its layer classes, and how its `generate` runs."""
    rows = ["| family | layer class | level | greedy and sampling |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda f: f.name):
        classes = ", ".join(f"`{name}`" for name in family.layers)
        rows.append(f"| {family.name} | {classes} | block | {_generation(family)} |")
    return "\n".join(rows) + "\n"


def summary(families: Iterable[Family]) -> str:
    """Return a table with a row per way to generate, listing the families."""
    kinds: dict[str, list[str]] = {_PACKED: [], _LOOP: [], _NONE: []}
    for family in families:
        kinds[_generation(family)].append(family.name)
    rows = ["| generates | level | families |", "|---|---|---|"]
    for kind, names in kinds.items():
        rows.append(f"| {kind} | block | {len(names)}: {', '.join(sorted(names))} |")
    return "\n".join(rows) + "\n"


_PACKED, _LOOP, _NONE = "packed batch, paged cache", "transformers' loop", "-"

_GENERATORS = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


def _generation(family: Family) -> str:
    if family.frame is not None:
        return _PACKED
    generates = any(kind in tiny.model for tiny in family.tiny for kind in _GENERATORS)
    return _LOOP if generates else _NONE
