"""Generates the reference page `docs/config.md` from the declarations of fields and their effects."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import torch

from slipstream.config.deprecated import DEPRECATED_NAMES
from slipstream.config.effects import EFFECTS
from slipstream.config.environment import VARIABLES
from slipstream.config.inference import InferenceConfig
from slipstream.config.section import Section, default_of, section_of

__all__ = ["fields", "render"]

_INTRODUCTION = """\
# Configuration

Generated from `slipstream.config`; a test keeps this page equal to it.

Pass fields to `slipstream.init_inference` as keyword arguments, in a dictionary, in a JSON file or in an
`InferenceConfig`, by name or by alias. The string `"auto"` means the default. A field that is given twice
must have the same value in both places. Unknown names are refused, and the error names the one that was
probably meant.

What a field does with a value other than its default:

- **acts**: it takes effect.
- **warns**: it changes nothing, and a warning says so.
- **refused**: it is an error.
- **unserved**: the value is checked, but this version builds no engine with it.
"""
_COLUMNS = ("field", "alias", "type", "default", "meaning", "effect")


def fields(section: type[Section] = InferenceConfig, path: str = "") -> Iterator[str]:
    """Yield the dotted name of every field; a section comes before its own fields."""
    for name in section.model_fields:
        yield f"{path}{name}"
        if (nested := section_of(section, name)) is not None:
            yield from fields(nested, f"{path}{name}.")


def render() -> str:
    """Return the page as markdown."""
    current = [name for name in InferenceConfig.model_fields if name not in DEPRECATED_NAMES]
    moved = [name for name in InferenceConfig.model_fields if name in DEPRECATED_NAMES]
    parts = [_INTRODUCTION, "## Top level\n", _table(InferenceConfig, current), *_nested(InferenceConfig, "")]
    parts += ["## Deprecated\n", _table(InferenceConfig, moved), "## Environment variables\n", _environment()]
    return "\n".join(parts)


def _nested(section: type[Section], path: str) -> Iterator[str]:
    for name in section.model_fields:
        if (nested := section_of(section, name)) is not None:
            yield f"## `{path}{name}`\n\n{(nested.__doc__ or '').splitlines()[0]}\n"
            yield _table(nested, list(nested.model_fields), f"{path}{name}.")
            yield from _nested(nested, f"{path}{name}.")


def _table(section: type[Section], names: list[str], path: str = "") -> str:
    return _rows(_COLUMNS, [_row(section, name, path) for name in names])


def _row(section: type[Section], name: str, path: str) -> tuple[str, ...]:
    field, effect = section.model_fields[name], EFFECTS[f"{path}{name}"]
    nested = section_of(section, name)
    kind = f"section, see `{path}{name}` below" if nested else f"`{_kind(field.annotation)}`"
    default = "" if nested else f"`{default_of(section, name)!r}`"
    alias = f"`{field.alias}`" if field.alias else ""
    return f"`{name}`", alias, kind, default, field.description or "", f"**{effect.kind}**. {effect.sentence}"


def _environment() -> str:
    return _rows(("variable", "meaning"), [(f"`{name}`", meaning) for name, meaning in VARIABLES.items()])


def _rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _kind(annotation: Any) -> str:
    """Format a type annotation for readers; `Any` becomes `object`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is torch.dtype:
        return "torch.dtype or str"
    if annotation is Any or annotation is Ellipsis:
        return "object" if annotation is Any else "..."
    if hasattr(annotation, "__metadata__"):
        return _kind(arguments[0])
    if origin is Literal:
        return " or ".join(repr(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_kind(argument) for argument in arguments)}]"
    return "None" if annotation is type(None) else str(annotation.__name__)
