"""Watches a model's forwards: what each of them requests decides how its layers run.

transformers collects attention maps and router logits with hooks on the submodules of a layer, without
passing the request to the layer: a forward that requests them runs the original code on restored weights. So
does a forward of a model that is set to use a custom attention function. Layers of a forward that does not
request their hidden states may be deferred (`defer.py`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.fused import defer
from slipstream.model.fused.chain import Encoder
from slipstream.model.fused.no_compile import as_it_is, prepare

__all__ = [
    "asks_for_internals",
    "asks_for_states",
    "attends_otherwise",
    "keep_padding",
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
"""Names of transformers' attention functions, all of which compute the same."""
_ATTENTION = "_attn_implementation_internal"
_SETTINGS = (
    "attention_chunk_size",
    "final_logit_softcapping",
    "layer_types",
    "logits_scaling",
    "sliding_window",
    "use_sliding_window",
)
"""Config attributes that models read in every call."""


@dataclass(frozen=True)
class _Watched:
    """State of a module when watching began.

    Attributes:
        attention: Name of the attention function of its layers.
        settings: Values of `_SETTINGS` in its config.
        is_read_whole: Its states at padded positions are read, too, or may be: it is part of an
            encoder-decoder model, of a pipeline, of a user's module, or under a head that averages all.
    """

    attention: Any
    settings: tuple[Any, ...]
    is_read_whole: bool


def attends_otherwise(module: nn.Module) -> bool:
    """Whether a module's attention was reconfigured since watching began.

    That is, it now has an attention function that is not transformers', or other `_SETTINGS` such as windows,
    which a model reads from its config in every call.
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
    """Return the attributes of a config, or {}; without properties, which take 1.5 us each."""
    try:
        values: Mapping[str, Any] = object.__getattribute__(module.config, "__dict__")
    except AttributeError:  # not a transformers class
        return {}
    return values


def wants_original() -> bool:
    """Whether the forward that is running in this context needs the layers' original code."""
    scope = defer.current()
    return scope is not None and scope.original


def asks_for_internals(kwargs: Mapping[str, Any], config: Any) -> bool:
    """Whether a call, or by default the model's config, requests outputs that only the original code has."""
    return _asks(_ASKED, kwargs, config)


def asks_for_states(kwargs: Mapping[str, Any], config: Any) -> bool:
    """Whether a call, or by default the model's config, requests the hidden states between layers."""
    return _asks(_STATES, kwargs, config)


def _asks(names: tuple[str, ...], kwargs: Mapping[str, Any], config: Any) -> bool:
    return any(kwargs[name] if kwargs.get(name) is not None else _setting(config, name) for name in names)


def _setting(config: Any, name: str) -> Any:
    """Return a config's attribute or False; transformers' configs take 25 us to fail on an unknown one."""
    kind = type(config)
    known = name in getattr(config, "__dict__", ()) or name in getattr(kind, "attribute_map", ())
    return (known or hasattr(kind, name) or hasattr(kind, "__getattr__")) and getattr(config, name, False)


@functools.cache
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a module's call by name."""
    return dict(zip(_parameters(type(module).forward), args, strict=False), **kwargs) if args else kwargs


def reads_padding(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether the output at padded positions is used: by a loss, as frames or patches, or another model."""
    known: _Watched | None = module.__dict__.get(_STATE)
    if known is not None and known.is_read_whole:
        return True
    targets = (value for name, value in given.items() if name in _TARGETS or name.endswith("labels"))
    return any(v is not None for v in targets) or not _reads_tokens(module) or _pools_an_end(module, given)


def _pools_an_end(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a text tower pools the first end token, which may be the padding before a row's first token."""
    if "eos_token_id" not in module.__dict__:
        return False
    mask = given.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, 0].all())


def _reads_tokens(module: nn.Module) -> bool:
    # The name alone is any model's default, also that of towers that see.
    named_so = getattr(module, "main_input_name", "") == "input_ids"
    return named_so and "input_ids" in _parameters(type(module).forward)


def _enter(encoder: Encoder | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        _begin(encoder, module, args, kwargs, sys._getframe(1))
    elif torch.compiler.is_dynamo_compiling():  # not torch.export: it traces the original, without `_leave`
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
    states = asks_for_states(given, config)
    drops = not states and not reads_padding(module, given)
    frame = frame or _compiled_caller()
    defer.enter(None if states else encoder, drops=drops, original=original, frame=frame)


def _compiled_caller() -> FrameType | None:
    """Return the frame that called `_enter` from compiled code: the first outside torch and this folder."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("torch._dynamo", "slipstream.model.fused")):
            return frame
        frame = frame.f_back
    return None


def _leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if not torch.compiler.is_compiling():
        defer.leave(failed=output is None)
    elif torch.compiler.is_dynamo_compiling():
        as_it_is(defer.leave, failed=output is None)


def watch(model: nn.Module | None, encoder: Encoder | None = None) -> None:
    """Watch every submodule that has its own config, as each of them may be called directly.

    Args:
        model: A model with fused layers; None where no layer is fused.
        encoder: Runs the layers of a forward in one call, if available.
    """
    prepare()
    enter = functools.partial(_enter, encoder)
    modules = [] if model is None else list(model.modules())
    # An encoder's config may not show that a decoder follows, and `generate` calls the encoder by itself.
    wholes = (
        module
        for module in modules
        if _has_both(module) or _is_of_others(module) or _reads_every_position(module)
    )
    paired = {id(part) for module in wholes for part in module.modules()}
    for module in modules:
        if hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            module.__dict__[_STATE] = _watched(module, is_read_whole=id(module) in paired)
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(_leave, with_kwargs=True, always_call=True)


def keep_padding(model: nn.Module) -> None:
    """Compute the states at padded positions as the original does: another model reads them."""
    for module in model.modules():
        if (known := module.__dict__.get(_STATE)) is not None:
            module.__dict__[_STATE] = replace(known, is_read_whole=True)


def _watched(module: nn.Module, *, is_read_whole: bool) -> _Watched:
    values = _values(module)
    settings = copy.deepcopy(tuple(map(values.get, _SETTINGS)))  # lists are changed in place
    return _Watched(values.get(_ATTENTION), settings, is_read_whole)


def _reads_every_position(module: nn.Module) -> bool:
    """Whether a head averages its model's states without the mask, or takes those beside the text."""
    if not hasattr(module, "config"):
        return False
    summaries = (getattr(part, "summary_type", "first") for part in module.modules())
    return type(module).__name__ in _BESIDE_TEXT or any(kind != "first" for kind in summaries)


def _is_of_others(module: nn.Module) -> bool:
    """Whether a module's class is the user's: what it reads of the models within it is not known."""
    return type(module).__module__.partition(".")[0] not in _KNOWN


_KNOWN = ("transformers", "torch", "peft", "sentence_transformers", "slipstream")
"""Packages whose modules pool by the mask, but for those that are named here."""

_BESIDE_TEXT = ("VisualBertForQuestionAnswering", "VisualBertForRegionToPhraseAlignment")


def _has_both(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
