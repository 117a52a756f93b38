"""The base of all configuration sections: names and aliases, "auto", unknown keys, wrong values.

A section is built in two steps. `normalise` turns what the caller wrote into a new dictionary by field names,
nested as the sections are, with "auto" left out; that form is compared and merged (`merge`). Then pydantic
validates the values, and each problem is reported in one line: field, value, bound, and what to do.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from slipstream.errors import ConfigError

__all__ = ["Section", "default_of", "merge", "normalise", "section_of", "spelled"]

_PHRASES = {
    "bool_type": "must be True or False",
    "int_type": "must be an integer",
    "string_type": "must be a string",
    "dict_type": "must be a dictionary",
    "list_type": "must be a list",
    "tuple_type": "must be a tuple",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entry",
    "literal_error": "must be {expected}",
    "is_instance_of": "must be a {class}",
}
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class Section(BaseModel):
    """One level of the configuration: frozen, without unknown fields, every field by its name or its alias.

    Raises:
        ConfigError: At construction, with a line for every unknown key, wrong type and value out of bounds.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, arbitrary_types_allowed=True
    )

    keeps_auto: ClassVar[frozenset[str]] = frozenset()
    """Fields for which the string "auto" is a value; for all others it means the default."""
    training_only: ClassVar[frozenset[str]] = frozenset()
    """Keys of this section in DeepSpeed that only have a meaning in training."""
    short_form: ClassVar[str] = ""
    """What may be given instead of a dictionary, for messages; see `shorthand`."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**normalise(type(self), values))
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(type(self), error))) from None

    @classmethod
    def shorthand(cls, value: object) -> object:
        """Expand a short form of the whole section to a mapping; return any other value unchanged."""
        return value

    def explicit(self) -> dict[str, Any]:
        """Return the fields that were given, by name, nested sections as dictionaries of the same kind."""
        given = {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        }
        return {
            name: value.explicit() if isinstance(value, Section) else value for name, value in given.items()
        }

    def __setattr__(self, name: str, value: object) -> None:
        raise ConfigError(f"{type(self).__name__}.{name} cannot be changed; build a new configuration")


def section_of(section: type[Section], name: str) -> type[Section] | None:
    """Return the section that a field holds, or None when the field holds a plain value."""
    kind = section.model_fields[name].annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def default_of(section: type[Section], name: str) -> Any:
    """Return a field's default; for a nested section, the section with nothing set."""
    return section.model_fields[name].get_default(call_default_factory=True)


def spelled(section: type[Section], name: str) -> str:
    """Name a field together with its alias, for a message that must match whichever the caller wrote."""
    alias = section.model_fields[name].alias
    return f"{name} (alias {alias})" if alias else name


def normalise(section: type[Section], given: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
    """Rewrite what the caller wrote by field names, as new dictionaries; the caller's are not changed.

    Args:
        section: The section that the keys belong to.
        given: Keys (names or aliases) and values; a nested section as mapping, instance or short form.
        path: Dotted prefix for messages, with the final dot.

    Raises:
        ConfigError: Unknown keys, training-only keys, or a field whose name and alias have different values.
    """
    names = _names(section)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in given.items():
        if (name := names.get(key)) is None:
            problems.append(_unknown(section, path, key))
        elif isinstance(value, str) and value == "auto" and name not in section.keeps_auto:
            continue
        else:
            try:
                plain = _plain(section, name, value, path)
            except ConfigError as error:
                problems.append(str(error))
                continue
            if name in values and not _same(section, name, values[name], plain):
                problems.append(
                    f"{path}{name} is given by its name and by its alias {section.model_fields[name].alias} "
                    f"with different values, {_short(values[name])} and {_short(plain)}; give one of them"
                )
            values[name] = plain
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def merge(
    section: type[Section], config: Mapping[str, Any], kwargs: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """Merge two normalised dictionaries; a field may be in both with the same value.

    Raises:
        ConfigError: A field has different values in the two; the message has a line for each such field.
    """
    merged, problems = {**config, **kwargs}, []
    for name in config.keys() & kwargs.keys():
        nested = section_of(section, name)
        if nested is not None:
            try:
                merged[name] = merge(nested, config[name], kwargs[name], f"{path}{name}.")
            except ConfigError as error:
                problems.append(str(error))
        elif not _same(section, name, config[name], kwargs[name]):
            problems.append(
                f"conflicting values for {path}{spelled(section, name)}: {_short(config[name])} in the "
                f"config and {_short(kwargs[name])} in the keyword arguments; give it once"
            )
    if problems:
        raise ConfigError("\n".join(sorted(problems)))
    return merged


def _plain(section: type[Section], name: str, value: object, path: str) -> Any:
    nested = section_of(section, name)
    if nested is None:
        return _copied(value)
    value = nested.shorthand(value)
    if isinstance(value, nested):
        return value.explicit()
    if isinstance(value, Mapping):
        return normalise(nested, value, f"{path}{name}.")
    raise ConfigError(
        f"{path}{name}={_short(value)} must be a dictionary of its fields: {', '.join(nested.model_fields)}"
        + (f"; or {nested.short_form}" if nested.short_form else "")
    )


def _copied(value: object) -> object:
    # Containers are copied, their contents are not: process groups and modules cannot be deep-copied.
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)  # type: ignore[attr-defined, call-arg]
    return value


def _same(section: type[Section], name: str, one: object, other: object) -> bool:
    """Whether two values of a field are equal once they are parsed ("fp32" and torch.float32 are)."""
    if section_of(section, name) is not None:
        return one == other
    field = section.model_fields[name]
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return bool(adapter.validate_python(one) == adapter.validate_python(other))
    except ValidationError:
        return bool(one == other)


def _unknown(section: type[Section], path: str, key: object) -> str:
    if key in section.training_only:
        return f"{path}{key} is a training field: inference has no optimizer and no gradients; remove it"
    known = {key: key for key in _names(section)}
    for name in section.model_fields:
        # A nested field written one level too high is a common slip: tp_size for tensor_parallel.tp_size.
        for inner in _names(nested) if (nested := section_of(section, name)) else ():
            known.setdefault(inner, f"{name}.{inner}")
    unknown = f"unknown field {f'{path}{key}'!r}"
    if (near := _nearest(str(key), known)) is None:
        return (
            f"{unknown}, and no field has a similar name; slipstream.default_inference_config() has them all"
        )
    return f"{unknown}; the nearest known one is {f'{path}{known[near]}'!r}"


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, if any: torch_dtype is dtype, zero_optimization is zero."""
    names = sorted(known, key=len, reverse=True)
    within = [name for name in names if len(name) > 3 and (key.startswith(name) or key.endswith(name))]
    return next(iter([*within, *difflib.get_close_matches(key, names, 1, 0.7)]), None)


def _names(section: type[Section]) -> dict[str, str]:
    """Map every spelling of a field, its name and its alias, to its name."""
    return {key: name for name, field in section.model_fields.items() for key in (name, field.alias) if key}


def _explain(section: type[Section], error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        context = problem.get("ctx", {})
        cause = context.get("error")
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])[1:]
        if isinstance(cause, ConfigError) or not where:
            # A nested section's message is complete already, and a contradiction names its fields itself.
            yield from (f"{where}.{line}" if where else line for line in str(cause).splitlines())
            continue
        phrase = str(cause) if cause is not None else _PHRASES.get(problem["type"], "")
        phrase = phrase.format(**context) if cause is None else phrase
        default = default_of(section, str(problem["loc"][0]))
        bound = f"{phrase or problem['msg']}; the default is {_short(default)}"
        yield f"{where}={_short(problem['input'])} {bound}"


def _short(value: object) -> str:
    return _SHORT.repr(value)
