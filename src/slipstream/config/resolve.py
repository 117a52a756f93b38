"""The four ways to configure `init_inference`: nothing, a configuration, keyword arguments, or both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config.inference import InferenceConfig, canonical
from slipstream.config.section import merge
from slipstream.errors import ConfigError

__all__ = ["resolve"]


def resolve(
    config: Mapping[str, Any] | str | os.PathLike[str] | InferenceConfig | None, kwargs: Mapping[str, Any]
) -> InferenceConfig:
    """Build the configuration from the caller's arguments; neither is changed.

    Args:
        config: A mapping, the path of a JSON file, a finished configuration, or None for the defaults.
        kwargs: Fields given as keyword arguments, by name or alias.

    Raises:
        ConfigError: A field with different values in both, a file that cannot be read as a JSON object, or
            whatever `InferenceConfig` refuses.
    """
    if isinstance(config, InferenceConfig) and not kwargs:
        return config
    return InferenceConfig(**merge(InferenceConfig, canonical(_fields(config)), canonical(kwargs)))


def _fields(config: object) -> Mapping[Any, Any]:
    if config is None:
        return {}
    if isinstance(config, InferenceConfig):
        return config.explicit()
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        return _read(os.fspath(config))
    if hasattr(config, "to_dict"):
        what = f"config is a {type(config).__name__} (entries of the model's config go into the field config)"
    else:
        what = f"config={config!r} is a {type(config).__name__}"
    raise ConfigError(f"{what}; give a dictionary, the path of a JSON file or an InferenceConfig")


def _read(path: str) -> Mapping[Any, Any]:
    if not path:
        raise ConfigError("config='' names no file; give the path of a JSON file, or leave it out")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"config={path!r} cannot be read: not UTF-8 text; give a JSON file") from error
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"config={path!r} cannot be read: {reason}; give a JSON file") from error
    try:
        fields = json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to be a configuration") from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{path} holds a JSON {type(fields).__name__}; the top level must be an object of fields"
        )
    return fields


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"the config file has {', '.join(twice)} twice in one object; keep one of them")
    return fields
