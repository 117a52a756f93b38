"""Casts a model to the engine's dtype as if transformers had loaded it so: angle tables stay in float32."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from slipstream.weights.mapped import MappedFiles

__all__ = ["MADE_IN_FLOAT32", "applies", "convert", "dtype_named", "is_quantized", "kept_in_float32", "move"]

_ANGLES = re.compile(r"freq|rot|cos|sin|timescale|embed_positions")
MADE_IN_FLOAT32 = frozenset({"inv_freq", "expert_bias"})
"""Persistent buffers that models make in float32 explicitly, and transformers leaves so."""


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> tuple[re.Pattern[str], ...]:
    """Return patterns of the parameters that transformers keeps in float32 when it loads a model in `dtype`.

    Source: transformers, modeling_utils.py, `_keep_in_fp32_modules`: some only for float16, for its range.
    """
    names: set[str] = set()
    always, ranged = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"
    for module in model.modules():
        for attribute in (always, ranged) if dtype == torch.float16 else (always,):
            names |= set(getattr(module, attribute, None) or ())
    return tuple(re.compile(rf"((^|\.){re.escape(name)}($|\.))") for name in sorted(names))


def convert(
    module: nn.Module,
    dtype: torch.dtype,
    *,
    keep: Iterable[re.Pattern[str]] = (),
    prefix: str = "",
    mapped: MappedFiles | None = None,
) -> None:
    """Cast floating parameters and persistent buffers in place, one tensor at a time.

    Frequencies, tables of angles that are not persistent, and biases of routers keep their dtype, as they do
    when transformers loads a model in half precision: rounded frequencies corrupt long prompts. A tensor that
    occurs in several places is cast once.

    Args:
        module: The module to cast.
        dtype: A floating dtype.
        keep: Patterns of full names to leave alone.
        prefix: The module's own path, to which the patterns apply.
        mapped: Mapped files whose pages are dropped once a parameter is cast; None where others still read
            them.
    """
    patterns = tuple(keep)
    for path, owner in module.named_modules(prefix=prefix):
        tables = owner._non_persistent_buffers_set
        for leaf, parameter in owner._parameters.items():
            if parameter is not None and applies(f"{path}.{leaf}", parameter, dtype, patterns):
                stored = parameter.data
                parameter.data = stored.to(dtype)
                if mapped is not None:
                    mapped.drop(mapped.holding([stored]))
        for leaf, buffer in owner._buffers.items():
            if buffer is None or (leaf in tables and _ANGLES.search(leaf)):
                continue
            if leaf in MADE_IN_FLOAT32 and buffer.dtype == torch.float32:
                continue
            if applies(f"{path}.{leaf}", buffer, dtype, patterns):
                owner._buffers[leaf] = buffer.to(dtype)


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model in place; tensors on the meta device, which are filled later, stay there."""
    mapped = MappedFiles()

    def there(tensor: Tensor) -> Tensor:
        if tensor.is_meta or tensor.device == device:
            return tensor
        moved = tensor.to(device)
        mapped.drop(mapped.holding([tensor]))
        return moved

    model._apply(there)


def applies(name: str, tensor: torch.Tensor, dtype: torch.dtype, keep: tuple[re.Pattern[str], ...]) -> bool:
    """Whether `convert` casts a tensor of this name."""
    if is_quantized(tensor) or tensor.dtype == dtype:
        return False
    return not _is_kept(name, dtype, keep)


def dtype_named(name: str, dtype: torch.dtype, keep: Iterable[re.Pattern[str]]) -> torch.dtype:
    """Return the dtype that a tensor of this name unpacks to: float32 if it is kept so, else `dtype`."""
    return torch.float32 if _is_kept(name, dtype, keep) else dtype


def _is_kept(name: str, dtype: torch.dtype, keep: Iterable[re.Pattern[str]]) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and any(pattern.search(name) for pattern in keep)


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds codes whose scales are stored elsewhere: integers or 8-bit floats."""
    return not tensor.is_floating_point() or tensor.dtype.itemsize < 2
