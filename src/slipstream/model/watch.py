"""Sends a forward that asks for attention maps or router logits through the original layers' code.

transformers collects such outputs with hooks on the submodules of a layer, and does not tell the layer. So
the model itself is watched: a forward that asks for them runs the original code, on restored weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn

__all__ = ["asks_for_internals", "wants_original", "watch"]

_ASKED = ("output_attentions", "output_router_logits")
_depth: ContextVar[int] = ContextVar("slipstream_original_depth", default=0)


def wants_original() -> bool:
    """Whether the forward that is running in this context needs the original layers' code."""
    return _depth.get() > 0


def asks_for_internals(kwargs: Mapping[str, Any], config: Any) -> bool:
    """Whether a call, or by default the model's config, asks for what only the original parts produce."""
    return any(
        kwargs[name] if kwargs.get(name) is not None else getattr(config, name, False) for name in _ASKED
    )


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if asks_for_internals(kwargs, getattr(module, "config", None)):
        _depth.set(_depth.get() + 1)


def _leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if asks_for_internals(kwargs, getattr(module, "config", None)):
        _depth.set(_depth.get() - 1)


def watch(model: nn.Module) -> None:
    """Watch every submodule that has a config of its own (each may be called directly)."""
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, with_kwargs=True, always_call=True)
