"""The kinds of value that a field can hold: what is accepted, how it is normalised, and the error messages.

A validator here raises `ValueError` with a predicate ("must be ..."); the section puts the field's name and
value in front of it. Different spellings of a value ("fp32" and `torch.float32`) are normalised to the same
one, so that giving a setting twice is not mistaken for a conflict.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, Strict
from torch import nn

__all__ = [
    "Amount",
    "BitWidth",
    "Checkpoint",
    "Count",
    "DType",
    "Experts",
    "Flag",
    "Folder",
    "Names",
    "ModelConfig",
    "PathText",
    "Policy",
    "to_dtype",
]

_SPELLINGS = {
    torch.float32: ("torch.float32", "float32", "fp32", "float", "torch.float"),
    torch.float16: ("torch.float16", "float16", "fp16", "half", "torch.half"),
    torch.bfloat16: ("torch.bfloat16", "bfloat16", "bf16", "bfloat"),
    torch.int8: ("torch.int8", "int8"),
}
_DTYPES = {spelling: dtype for dtype, spellings in _SPELLINGS.items() for spelling in spellings}
_BIT_WIDTHS = (4, 6, 8)


def to_dtype(value: object) -> torch.dtype:
    """Parse a dtype given as a `torch.dtype` or in any of DeepSpeed's spellings, in upper or lower case.

    Raises:
        ValueError: The value is neither, or a dtype that inference does not run in.
    """
    dtype = _DTYPES.get(value.lower()) if isinstance(value, str) else value
    if isinstance(dtype, torch.dtype) and dtype in _SPELLINGS:
        return dtype
    allowed = "; ".join(", ".join(spellings) for spellings in _SPELLINGS.values())
    raise ValueError(f"must be one of {allowed}")


def _whole(value: object) -> object:
    # numpy's integers are integers; a bool is not, though it is an int.
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _amount(value: object) -> object:
    value = _whole(value)
    # JSON has no integers in scientific notation: 5e7, which every ZeRO example writes, arrives as a float.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bit_width(value: object) -> object:
    value = _whole(value)
    if type(value) is not int or value not in _BIT_WIDTHS:
        raise ValueError("must be 4, 6 or 8")
    return value


def _experts(value: object) -> object:
    value = _whole(value)
    return [value] if type(value) is int else value


def _text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _path(value: object) -> object:
    if value == "":
        raise ValueError("must not be empty")
    return _text(value)


def _checkpoint(value: object) -> str | dict[Any, Any] | None:
    if value is None or (isinstance(value, Mapping) and value):
        return None if value is None else dict(value)
    text = _text(value)
    if not isinstance(text, str) or not text:
        raise ValueError("must be the path of a file or folder, or DeepSpeed's dictionary of files")
    return text


def _model_config(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _policy(value: object) -> dict[type[nn.Module], Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            "must map layer classes to the names of their output linears, "
            "as in {LlamaDecoderLayer: ('self_attn.o_proj', 'mlp.down_proj')}"
        )
    for layer in value:
        if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
            raise ValueError(f"has the key {layer!r}: every key must be a subclass of torch.nn.Module")
    return {layer: _outputs(layer, target) for layer, target in value.items()}


def _outputs(layer: type[nn.Module], target: object) -> object:
    """Check one value of a policy: names of output linears, or a family (anything with a `spec`)."""
    names = (target,) if isinstance(target, str) else target
    if isinstance(names, tuple | list):
        if names and all(isinstance(name, str) and name for name in names):
            return target if isinstance(target, str) else tuple(names)
    elif hasattr(target, "spec"):
        return target
    raise ValueError(
        f"has the value {target!r} for {layer.__name__}: "
        "every value must be the name of an output linear, a non-empty tuple of names, or a family"
    )


Flag = Annotated[bool, Strict()]
Count = Annotated[int, BeforeValidator(_whole), Strict(), Field(ge=1)]
Amount = Annotated[int, BeforeValidator(_amount), Strict(), Field(ge=0)]
BitWidth = Annotated[int, BeforeValidator(_bit_width)]
Experts = Annotated[list[Count], BeforeValidator(_experts), Field(min_length=1)]
DType = Annotated[torch.dtype, BeforeValidator(to_dtype), PlainSerializer(str, when_used="json")]
PathText = Annotated[str | None, BeforeValidator(_path)]
Checkpoint = Annotated[str | dict[Any, Any] | None, BeforeValidator(_checkpoint)]
Folder = Annotated[str, BeforeValidator(_text)]
ModelConfig = Annotated[dict[str, Any] | None, BeforeValidator(_model_config)]
Names = tuple[Any, ...] | None
Policy = Annotated[dict[type[nn.Module], Any] | None, BeforeValidator(_policy)]
