"""The table of families as markdown, made from the registry for the README."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.families.family import Family

__all__ = ["render"]


def render(families: Iterable[Family]) -> str:
    """One row per family: its name, its layer classes, and how its `generate` runs."""
    rows = ["| family | layer class | level | greedy and sampling |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda f: f.name):
        classes = ", ".join(f"`{name}`" for name in family.layers)
        rows.append(f"| {family.name} | {classes} | block | {_generation(family)} |")
    return "\n".join(rows) + "\n"


_GENERATORS = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


def _generation(family: Family) -> str:
    if family.frame is not None:
        return "packed batch, paged cache"
    generates = any(kind in tiny.model for tiny in family.tiny for kind in _GENERATORS)
    return "transformers' loop" if generates else "-"
