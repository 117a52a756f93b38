"""DeepSpeed's fields that moved: a table by which they are mapped, mirrored and warned about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.config.notices import warn_once
from slipstream.errors import ConfigError

__all__ = ["DEPRECATED", "DEPRECATED_NAMES", "Deprecated", "announce", "as_written", "move"]

_REMOVAL = "Slipstream 2.0"


@dataclass(frozen=True)
class Deprecated:
    """A deprecated top-level field, and the nested field that replaces it, if any."""

    name: str
    section: str = ""
    field: str = ""

    @property
    def replacement(self) -> str:
        """Dotted name of the replacement, empty if there is none."""
        return f"{self.section}.{self.field}" if self.section else ""


DEPRECATED = (
    Deprecated("replace_method"),
    Deprecated("mp_size", "tensor_parallel", "tp_size"),
    Deprecated("mpu", "tensor_parallel", "mpu"),
    Deprecated("ep_size", "moe", "ep_size"),
    Deprecated("ep_group", "moe", "ep_group"),
    Deprecated("ep_mp_group", "moe", "ep_mp_group"),
    Deprecated("moe_experts", "moe", "moe_experts"),
    Deprecated("moe_type", "moe", "type"),
)
DEPRECATED_NAMES = frozenset(entry.name for entry in DEPRECATED)


def move(values: dict[str, Any]) -> tuple[dict[str, Any], list[Deprecated]]:
    """Move the values of deprecated fields to the fields that replace them.

    Args:
        values: Normalised top-level fields; not changed.

    Returns:
        The fields after moving, and the deprecated entries that were in use.

    Raises:
        ConfigError: A deprecated field is given together with its replacement.
    """
    used = [entry for entry in DEPRECATED if entry.name in values]
    moved = {name: value for name, value in values.items() if name not in DEPRECATED_NAMES}
    problems = []
    for entry in used:
        value = values[entry.name]
        if not entry.section:
            moved[entry.name] = value
            continue
        section = moved.get(entry.section, {})
        if entry.field in section:
            problems.append(
                f"{entry.name}={value!r} (deprecated) and {entry.replacement}={section[entry.field]!r} "
                f"are refused together, even when they agree; keep {entry.replacement}"
            )
        moved[entry.section] = {**section, entry.field: value}
    if problems:
        raise ConfigError("\n".join(problems))
    return moved, used


def as_written(message: str, used: list[Deprecated]) -> str:
    """Add the deprecated names that the caller wrote to a message that names their replacements."""
    for entry in used:
        if entry.section:
            message = message.replace(f"{entry.replacement}=", f"{entry.name} (now {entry.replacement})=")
    return message


def announce(used: list[Deprecated]) -> None:
    """Warn about each deprecated field in use, once per process."""
    for entry in used:
        advice = f"use {entry.replacement} instead" if entry.section else "it does nothing; leave it out"
        warn_once(f"{entry.name} is deprecated and will be removed in {_REMOVAL}; {advice}", FutureWarning)
