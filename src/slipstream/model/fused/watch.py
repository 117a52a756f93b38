"""Watches a model's forwards: what each of them asks for decides how its layers run.

transformers collects attention maps and router logits with hooks on the submodules of a layer, and does not
tell the layer: a forward that asks for them runs the original code, on restored weights. So does one of a
model that was told to attend by somebody's own function. Layers of a forward that asks for none of their
states may wait for each other (`defer.py`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from slipstream.model.fused import defer
from slipstream.model.fused.chain import Encoder
from slipstream.model.fused.no_compile import as_it_is, prepare

__all__ = [
    "asks_for_internals",
    "asks_for_states",
    "attends_otherwise",
    "named",
    "reads_padding",
    "wants_original",
    "watch",
]

_ASKED = ("output_attentions", "output_router_logits")
_STATES = ("output_hidden_states",)
_TARGETS = frozenset({"next_sentence_label", "start_positions", "end_positions"})
_STATE = "_slipstream_watched"
_ATTENTIONS = frozenset(
    {
        None,
        "eager",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
        "flex_attention",
        "paged|eager",
        "sdpa",
    }
)
"""Transformers' own names of functions, all of which compute the same."""
_ATTENTION = "_attn_implementation_internal"
_SETTINGS = (
    "attention_chunk_size",
    "final_logit_softcapping",
    "layer_types",
    "logits_scaling",
    "sliding_window",
    "use_sliding_window",
)
"""What models read of their configs in every call."""


@dataclass(frozen=True)
class _Watched:
    """What is remembered of a module that is watched.

    Attributes:
        attention: Name of the function that its layers were told to attend by.
        settings: What its config said of how it attends, and of logits.
        heard: It is a part of a model whose decoder hears what an encoder says.
    """

    attention: Any
    settings: tuple[Any, ...]
    heard: bool


def attends_otherwise(module: nn.Module) -> bool:
    """Whether a module was told, since it is watched, to attend otherwise.

    That is by a function that is not transformers', or by other windows, which a model asks its config for in
    every call.
    """
    known: _Watched | None = module.__dict__.get(_STATE)
    if known is None:
        return False
    values = _values(module)
    name = values.get(_ATTENTION)
    if name not in _ATTENTIONS and name != known.attention:
        return True
    return tuple(map(values.get, _SETTINGS)) != known.settings


def _values(module: nn.Module) -> Mapping[str, Any]:
    """What a module's config holds, without its properties, which take 1.5 us each; {} where it has none."""
    try:
        values: Mapping[str, Any] = object.__getattribute__(module.config, "__dict__")
    except AttributeError:  # of a class that is not transformers'
        return {}
    return values


def wants_original() -> bool:
    """Whether the forward that is running in this context needs the original layers' code."""
    scope = defer.current()
    return scope is not None and scope.original


def asks_for_internals(kwargs: Mapping[str, Any], config: Any) -> bool:
    """Whether a call, or by default the model's config, asks for what only the original parts produce."""
    return _asks(_ASKED, kwargs, config)


def asks_for_states(kwargs: Mapping[str, Any], config: Any) -> bool:
    """The same of the states between layers."""
    return _asks(_STATES, kwargs, config)


def _asks(names: tuple[str, ...], kwargs: Mapping[str, Any], config: Any) -> bool:
    return any(kwargs[name] if kwargs.get(name) is not None else _setting(config, name) for name in names)


def _setting(config: Any, name: str) -> Any:
    """What a config says; one of transformers' takes 25 us to say that it has no such attribute."""
    kind = type(config)
    known = name in getattr(config, "__dict__", ()) or name in getattr(kind, "attribute_map", ())
    return (known or hasattr(kind, name) or hasattr(kind, "__getattr__")) and getattr(config, name, False)


@functools.cache
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call by name."""
    return dict(zip(_parameters(type(module).forward), args, strict=False), **kwargs) if args else kwargs


def reads_padding(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether what leaves padded positions counts: in a loss, in frames of sound, in keys for a decoder."""
    known: _Watched | None = module.__dict__.get(_STATE)
    if known is not None and known.heard:
        return True
    targets = (value for name, value in given.items() if name in _TARGETS or name.endswith("labels"))
    return any(v is not None for v in targets) or getattr(module, "main_input_name", "") != "input_ids"


def _enter(encoder: Encoder | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        _begin(encoder, module, args, kwargs, sys._getframe(1))
    elif torch.compiler.is_dynamo_compiling():  # torch.export sees the original, and would not leave
        as_it_is(_begin, encoder, module, args, kwargs)


def _begin(
    encoder: Encoder | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frame: FrameType | None = None,
) -> None:
    config, given = getattr(module, "config", None), named(module, args, kwargs)
    original = asks_for_internals(kwargs, config) or attends_otherwise(module)
    states = encoder is not None and asks_for_states(given, config)
    drops = not reads_padding(module, given)
    frame = frame or _compiled_caller()
    defer.enter(None if states else encoder, drops=drops, original=original, frame=frame)


def _compiled_caller() -> FrameType | None:
    """The frame that called `_enter` from compiled code: the first one beyond the compiler's own and `as_it_is`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith(("torch._dynamo", "slipstream.model.fused"))
    ):
        frame = frame.f_back
    return frame


def _leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if not torch.compiler.is_compiling():
        defer.leave(failed=output is None)
    elif torch.compiler.is_dynamo_compiling():
        as_it_is(defer.leave, failed=output is None)


def watch(model: nn.Module | None, encoder: Encoder | None = None) -> None:
    """Watch every submodule that has a config of its own (each may be called directly).

    Args:
        model: Has fused layers; None where no layer is.
        encoder: Runs those of a forward in one go, where anything does.
    """
    prepare()
    enter = functools.partial(_enter, encoder)
    modules = [] if model is None else list(model.modules())
    # The config of such a model's encoder may not say what it is a part of, and `generate` calls it alone.
    heard = {id(part) for module in modules if _has_both(module) for part in module.modules()}
    for module in modules:
        if hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            module.__dict__[_STATE] = _watched(module, heard=id(module) in heard)
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(_leave, with_kwargs=True, always_call=True)


def _watched(module: nn.Module, *, heard: bool) -> _Watched:
    values = _values(module)
    settings = copy.deepcopy(tuple(map(values.get, _SETTINGS)))  # lists are changed in place
    return _Watched(values.get(_ATTENTION), settings, heard)


def _has_both(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
