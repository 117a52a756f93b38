"""Reasons for which a call of `generate` is left to transformers' own loops.

Shapes: B batch, S prompt (padded).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engine.frames import decoder_of, text_config
from slipstream.engine.generation.assisted import ASSISTED, why_not_assisted
from slipstream.engine.generation.beams import BEAMS, samples, searches
from slipstream.engine.generation.export import why_not_exported
from slipstream.engine.generation.request import Request, cache_matters
from slipstream.engine.generation.resumed import prepares_by_default
from slipstream.engine.generation.runner import Runner
from slipstream.model.fused.inject import widens
from slipstream.model.fused.layer_changes import has_global_hooks, is_hooked, modules_of
from slipstream.model.fused.state import injected_state, is_injected, is_untouched
from slipstream.model.fused.watch import attends_otherwise
from slipstream.model.values import wants_operations
from slipstream.model.weights.packed import weight_of

__all__ = [
    "MODES",
    "why_not_intact",
    "why_not_kept",
    "why_not_packed",
    "why_not_readable",
    "why_not_repeated",
    "why_not_so_long",
]

MODES = ("greedy_search", "sample", *BEAMS)
"""Transformers' names of the generation modes that the engine road supports for every model."""

_OWN = frozenset({"attention_mask", "input_ids", "inputs", "logits_to_keep", "past_key_values", "use_cache"})
_OWN_OF_PAIRS = _OWN | {"decoder_input_ids", "input_values"}
_PICTURES = frozenset({"pixel_values", "interpolate_pos_encoding"})
"""Inputs of an encoder of pictures, which transformers runs before it hands over."""


def why_not_packed(
    model: nn.Module,
    request: Request,
    kwargs: Mapping[str, Any],
    *,
    takes_over: bool = False,
    typed: bool = False,
) -> str | None:
    """Return why a call of `generate` cannot take the engine road, or None if it can.

    Args:
        model: The causal language model.
        request: The call as read by `read_request`.
        kwargs: The call's arguments.
        takes_over: The model's own forward runs the prompt, so any inputs of the model are accepted.
        typed: Tokens have types, and the engine gives all of them type 0.
    """
    embeds = kwargs.get("inputs_embeds")
    if request.prompt is None and not request.encoded and embeds is None:
        return "no token ids are given"
    if embeds is not None and (reason := _why_not_embedded(model, request, kwargs)) is not None:
        return reason
    if (method := _own_method(model)) is not None:
        return f"{method} was replaced on the model object"
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return "autocast is on"
    for name in (
        "custom_generate",
        "position_ids",
        "synced_gpus",
        "encoder_outputs",
    ):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            return f"{name} is given"
    config, inputs = request.config, request.inputs
    if (mode := _why_not_mode(model, request, kwargs, takes_over)) is not None:
        return mode
    if takes_over and config.get_generation_mode(None).value in BEAMS:
        return "the engine has no beam search for models with images or audio"
    if not takes_over and (extra := _others(model, request, typed=typed)):
        return f"the call has model inputs that the engine does not support: {', '.join(extra)}"
    for name in (
        "output_attentions",
        "output_hidden_states",
        "prefill_chunk_size",
        "token_healing",
    ):
        if getattr(config, name, None):
            return f"{name} is set"
    if cache_matters(config, encoded=request.encoded):
        return "cache_implementation is set"
    if request.encoded and config.return_dict_in_generate:
        return "return_dict_in_generate is set"
    if config.use_cache is False or inputs.get("use_cache") is False:
        return "use_cache is False"
    if config.stop_strings is not None and (
        kwargs.get("tokenizer") is None or kwargs.get("stop_strings") is None
    ):
        return "stop_strings are set in a generation config, or given without a tokenizer"
    return _why_not_masked(request, kwargs.get("attention_mask"))


def _why_not_embedded(model: nn.Module, request: Request, kwargs: Mapping[str, Any]) -> str | None:
    """Return why the road cannot follow a prompt of embeddings, which the model's own forward runs."""
    embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
    if request.encoded:
        return "inputs_embeds is given to an encoder"
    if not prepares_by_default(model, request):
        return "inputs_embeds is given to a model that prepares its inputs in a way of its own"
    if request.config.get_generation_mode(kwargs.get("assistant_model")).value in (*BEAMS, ASSISTED):
        return "inputs_embeds is given to a search, or to a model with an assistant"
    ids = 0 if request.prompt is None else request.prompt.shape[1]
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or embeds.shape[1] < ids:
        return "inputs_embeds are fewer than the ids, or no tensor of three dims"
    if isinstance(mask, Tensor) and mask.shape != embeds.shape[:2]:
        return "the attention mask has another shape than the embeddings"
    return None


def _why_not_masked(request: Request, mask: Tensor | None) -> str | None:
    """Return why the road does not support a call's attention mask, or None if it does."""
    mask = _inferred_mask(request) if mask is None else mask
    if mask is not None and not request.encoded and not _is_left_padded(mask):
        return "the attention mask is not zeros on the left followed by ones"
    if request.encoded and isinstance(mask, Tensor) and not bool((mask != 0).any(-1).all()):
        return "the attention mask hides all tokens of a row"  # with additive masks it sees everything
    return None


def _own_method(model: nn.Module) -> str | None:
    """Return the name of a `GenerationMixin` method that was set on the model object itself, if any."""
    return next((name for name in vars(model) if name in _methods()), None)


@functools.cache
def _methods() -> frozenset[str]:
    """Names of the methods that transformers' `generate` may call on a model."""
    from transformers import GenerationMixin

    return frozenset(name for name, value in vars(GenerationMixin).items() if callable(value))


def _others(model: nn.Module, request: Request, *, typed: bool) -> list[str]:
    """List the call's model inputs that the engine road does not support."""
    own = _OWN_OF_PAIRS if request.encoded else _OWN | {"inputs_embeds"}
    if request.encoded and getattr(model, "main_input_name", None) == "pixel_values":
        own |= _PICTURES
    types = request.inputs.get("token_type_ids")
    if decoder_of(model) if request.encoded else typed and _all_first(types, request):
        own |= {"token_type_ids"}  # the encoder's, which transformers runs before it hands over; or type 0
    given = request.inputs.items()
    return [name for name, value in given if name not in own and value is not None and value is not False]


def _all_first(types: Any, request: Request) -> bool:
    """Whether token types are given for the prompt, and all are 0."""
    prompt = request.prompt
    given = isinstance(types, Tensor) and prompt is not None and types.shape == prompt.shape
    return given and not bool(types.any())


def _why_not_mode(
    model: nn.Module, request: Request, kwargs: Mapping[str, Any], takes_over: bool
) -> str | None:
    """Return why the road does not support how a call chooses tokens, or their number; None if it does."""
    config, streamer, assistant = request.config, kwargs.get("streamer"), kwargs.get("assistant_model")
    mode = config.get_generation_mode(assistant).value
    if mode not in (*MODES, ASSISTED):
        return f"the generation mode is {mode}"
    if any(count is not None and count != int(count) for count in (config.max_new_tokens, config.max_length)):
        return "max_new_tokens or max_length is not an integer"  # transformers' loop ends only beyond it
    if mode == ASSISTED:
        if takes_over or request.encoded or request.prompt is None:
            return "the engine assists models of one sequence of tokens only"
        return why_not_assisted(model, config, assistant, request.prompt.shape[0])
    if mode in BEAMS and streamer is not None:
        return "a streamer is given, and beam search cannot stream"  # transformers raises this error, too
    if mode in BEAMS:
        return None if searches(model) else "the model overrides transformers' beam search"
    return None if samples(model) else "the model overrides transformers' sampling loop"


def why_not_repeated(model: nn.Module, request: Request, kwargs: Mapping[str, Any]) -> str | None:
    """Return why none of the `generate` calls that a model makes itself can take the engine road.

    None if they may: `Loop` then decides about each of them.

    Args:
        model: A model for which `repeats_generate` is true.
        request: The call as read by `read_request`.
        kwargs: The call's arguments.
    """
    if (method := _own_method(model)) is not None:
        return f"{method} was replaced on the model object"
    mode = request.config.get_generation_mode(None).value
    if mode not in MODES:
        return f"the generation mode is {mode}"
    if mode in BEAMS and kwargs.get("streamer") is not None:
        return "a streamer is given, and beam search cannot stream"  # transformers raises this error, too
    # `no_speech_threshold` adds a processor that keeps all arguments of the call and repeats it.
    for name in (
        "assistant_model",
        "custom_generate",
        "encoder_outputs",
        "past_key_values",
        "no_speech_threshold",
    ):
        if kwargs.get(name) is not None:
            return f"{name} is given"
    settings = kwargs.get("generation_config"), model.generation_config
    if any(getattr(one, "no_speech_threshold", None) is not None for one in settings):
        return "no_speech_threshold is set"
    return None


def why_not_intact(model: nn.Module, runner: Runner) -> str | None:
    """Return why the engine road would differ from the model as it is now, or None if it would not.

    Args:
        model: The model, which may have been trained, hooked or rebuilt since the engine was made.
        runner: The runner made from it.
    """
    if model.training:
        return "the model is in training mode"
    if wants_operations():
        return "torch operations are being traced, counted or transformed"
    # Modules within the layers are checked below, by `is_untouched`.
    around = modules_of(model, runner.frame.layers)
    if has_global_hooks() or any(map(is_hooked, around)):
        return "hooks are registered on the model's parts"
    if any(map(attends_otherwise, around)):
        return "another attention implementation was set, or the config was changed"
    changed = runner.frame.replaced(model)
    if changed is not None:
        return f"{changed or 'the model'} was replaced, or its forward was"
    if runner.frame.embed._parameters.get("weight") is None:
        return "the weight of the token embedding is computed"
    if widens(runner.blocks[0], weight_of(runner.frame.embed).computes_in):
        return "the token embedding has a narrower dtype than the layers, whose weights widen it"
    if getattr(runner.frame.embed, "max_norm", None) is not None:
        return "the token embedding has max_norm, which rescales its rows"
    if not runner.frame.keeps_numbers:
        return "a numeric attribute of a module around the layers was changed"
    if not runner.frame.keeps_scale:
        return "the multiplier of the token embedding was changed"
    if len(runner.frame.layers) != len(runner.blocks):
        return f"the model now has {len(runner.frame.layers)} layers instead of {len(runner.blocks)}"
    for layer, block in zip(runner.frame.layers, runner.blocks, strict=True):
        if not is_injected(layer) or injected_state(layer).block is not block:
            return "a layer was replaced"
        if "forward" in vars(layer) or not is_untouched(layer):
            return "a module, the code or a tensor of a layer was replaced, or the layer was moved"
    return None


def why_not_readable(runner: Runner, request: Request) -> str | None:
    """Return why the engine road cannot read a prompt that custom code of a model may accept; None if it can.

    Args:
        runner: Looks the ids up in the token embedding, unless the model's own forward runs the prompts.
        request: The call as read by `read_request`.
    """
    prompt, mask = request.prompt, request.inputs.get("attention_mask")
    if prompt is None or request.inputs.get("inputs_embeds") is not None:
        return None
    if prompt.numel() == 0:
        return "the prompt is empty"
    if isinstance(mask, Tensor) and mask.shape != prompt.shape:
        return "the attention mask has another shape than the ids"
    if runner.takes_over or request.encoded:  # the model's own code reads the ids
        return None
    low, high = (int(edge) for edge in prompt.aminmax())
    rows = runner.frame.matrices()["embed"].shape[0]
    return None if low >= 0 and high < rows else "ids lie outside of the token embedding"


def why_not_kept(model: nn.Module, runner: Runner, request: Request, assistant: Any = None) -> str | None:
    """Return why what the layers keep cannot be returned, or taken back, as a call needs; None if it can.

    Args:
        model: The model.
        runner: Runs the model.
        request: The call as read by `read_request`.
        assistant: The assistant model, or None.
    """
    returns = request.config.return_dict_in_generate and not request.encoded
    if returns and (unknown := why_not_exported(model, runner)) is not None:
        return f"return_dict_in_generate is set, and {unknown}"
    if request.config.get_generation_mode(assistant).value == ASSISTED:
        if any(block.spec.recurrence is not None for block in runner.blocks):
            return "some layers keep states, which cannot be taken back"
        if runner.frame.angles_share_a_length:
            return "rotary angles depend on the longest sequence"
    return None


def why_not_so_long(model: nn.Module, runner: Runner, request: Request) -> str | None:
    """Return why the engine road cannot generate as many tokens as requested, or None if it can.

    Args:
        model: Its config decides how many tokens transformers' cache keeps.
        runner: Knows the number of positions, and at which length the original restarts.
        request: The call as read by `read_request`.
    """
    most, restart = runner.frame.max_positions, runner.frame.spec.restart
    length = _decoded(request) if request.encoded else request.length
    total = length + request.new_tokens
    if most is not None and total > most:
        return f"{total} tokens exceed the {most} positions of the position embedding"
    if restart is not None and length <= restart < total:
        return f"the original recomputes its cache at {restart} tokens"
    kept = _kept_tokens(model, runner)
    if kept is not None and total > kept:
        return f"transformers' cache keeps {kept} tokens, but a layer attends to a different number"
    growths = (block.spec.growth for block in runner.blocks)
    if any(growth is not None and growth.padded for growth in growths) and _is_padded(request):
        return "queries are scaled by positions that count padding"
    padding = runner.frame.spec.pos_padding
    if padding is not None and request.encoded and _starts_with(request, padding):
        return "the decoder's prompt contains padding tokens, which have no position"
    return None


def _is_padded(request: Request) -> bool:
    """Whether a row of the prompt begins with padding."""
    mask = request.inputs.get("attention_mask")
    mask = _inferred_mask(request) if mask is None else mask
    return isinstance(mask, Tensor) and not bool((mask != 0).all())


def _starts_with(request: Request, token: int) -> bool:
    """Whether a token is among those that a decoder starts from."""
    given = request.inputs.get("decoder_input_ids")
    start = request.config.decoder_start_token_id
    starts = start if isinstance(start, list) else [start]
    return isinstance(given, Tensor) and (token in starts or bool((given == token).any()))


def _decoded(request: Request) -> int:
    """Return the maximum number of tokens that a decoder starts from: the given ones and a start token."""
    given = request.inputs.get("decoder_input_ids")
    return 1 + (int(given.shape[-1]) if isinstance(given, Tensor) else 0)


def _kept_tokens(model: nn.Module, runner: Runner) -> int | None:
    """Return the smallest window of transformers' cache that differs from its layer's own window, if any.

    The cache follows the config, so it has windows even for layer classes that ignore `sliding_window`.
    """
    from transformers import DynamicCache

    config: Any = (
        text_config(model, runner.frame.spec.root)
        if runner.takes_over
        else model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
    )
    if getattr(config, "sliding_window", None) is None:
        return None
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    # A window of one token counts as none: the cache keeps the slice of the last `window - 1` = 0 tokens,
    # and that slice, `[-0:]`, is all of them.
    seen = [None if block.spec.window == 1 else block.spec.window for block in runner.blocks]
    differ = (kept for kept, own in zip(windows, seen, strict=False) if kept is not None and kept != own)
    return min(differ, default=None)


def _inferred_mask(request: Request) -> Tensor | None:
    """Return the mask that transformers infers if none is given; None if no token counts as padding."""
    ids, pad, ends = request.prompt, request.config.pad_token_id, request.config.eos_token_id
    if request.inputs.get("inputs_embeds") is not None:
        return None
    pad = pad.item() if isinstance(pad, Tensor) else pad
    ends = ends.flatten().tolist() if isinstance(ends, Tensor) else ends
    if ids is None or pad is None or pad in (ends if isinstance(ends, list | tuple) else (ends,)):
        return None
    mask = ids != pad
    return None if bool(mask.all()) else mask


def _is_left_padded(mask: Tensor) -> bool:
    """Whether every row is zeros followed by ones; other values would each count as several positions."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    real = mask != 0
    ones = bool((mask == real).all())
    return ones and bool(real[:, -1].all()) and bool((real[:, 1:] | ~real[:, :-1]).all())
