"""Reads a call of `generate` before it runs: prompt, length, and whether the engine road can serve it.

Shapes: B batch, S prompt (padded).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engine.beams import BEAMS, searches
from slipstream.engine.runner import Runner
from slipstream.model.inject import injected_state, is_injected, is_untouched
from slipstream.model.intact import is_hooked, listens_everywhere, modules_of

__all__ = [
    "MODES",
    "Request",
    "by_name",
    "cache_matters",
    "move_stop_strings",
    "read_request",
    "repeats_generate",
    "unread_cache",
    "why_not_intact",
    "why_not_packed",
    "why_not_repeated",
    "why_not_so_long",
]

MODES = ("greedy_search", "sample", *BEAMS)
"""Transformers' names of what the engine road knows."""

_OWN = frozenset({"attention_mask", "input_ids", "inputs", "logits_to_keep", "use_cache"})
_OWN_OF_PAIRS = _OWN | {"decoder_input_ids", "input_values"}
_ARGUMENTS = frozenset(
    {
        "assistant_model",
        "assistant_tokenizer",
        "custom_generate",
        "generation_config",
        "inputs",
        "logits_processor",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
        "trust_remote_code",
    }
)
"""Arguments of transformers' `generate` that are neither generation settings nor inputs of the model."""


@dataclass(frozen=True)
class Request:
    """A call of `generate`.

    Attributes:
        prompt: `(B, S)` token ids, or None where the call has none.
        length: Tokens of the prompt, padding included; 1 where there is none and generation starts from one
            token.
        new_tokens: Tokens that the call asks for.
        encoded: The prompt goes into an encoder, and the new tokens do not follow it.
        config: The complete generation config.
        inputs: Arguments that are left for the model.
    """

    prompt: Tensor | None
    length: int
    new_tokens: int
    encoded: bool
    config: Any
    inputs: Mapping[str, Any]


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the model's `generate`, all by name.

    Raises:
        TypeError: More positional arguments than `generate` has, or one that is given by name too.
    """
    generate: Any = model.generate
    plain = getattr(generate, "__func__", generate)
    own = () if plain is generate else (model,)
    bound = _signature(plain).bind(*own, *args, **kwargs)
    others = bound.kwargs  # what stands after the positional ones, and everything that has no name of its own
    named = dict(zip(bound.signature.parameters, bound.args, strict=False))
    for name in list(named)[: len(own)]:
        del named[name]
    return {**named, **others}


@functools.lru_cache(maxsize=32)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Of a function; reading one takes 0.1 ms."""
    return inspect.signature(function)


def read_request(model: nn.Module, kwargs: Mapping[str, Any]) -> Request:
    """Read a call.

    Args:
        model: Has transformers' `generate`.
        kwargs: From `by_name`.
    """
    given = kwargs.get("generation_config")
    settings = {name: value for name, value in kwargs.items() if name not in _ARGUMENTS}
    config, inputs = model._prepare_generation_config(given, **settings)  # type: ignore[operator]
    first = kwargs.get("inputs")
    ids = kwargs.get("input_ids") if first is None else first
    embeds = kwargs.get("inputs_embeds")
    prompt = ids if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() else None
    # Samples of sound, or spectra, are no tokens, though they may come as `inputs`.
    told = None if isinstance(ids, Tensor) and ids.is_floating_point() else ids
    entry = next((t for t in (told, embeds) if isinstance(t, Tensor) and t.dim() > 1), None)
    length = 1 if entry is None else int(entry.shape[1])
    owners: tuple[Any, ...] = (given, model.generation_config)
    is_default = settings.get("max_length") is None and all(
        owner is None or owner.max_length is None for owner in owners
    )
    encoded = bool(getattr(model.config, "is_encoder_decoder", False))
    return Request(
        prompt, length, _new_tokens(model, config, length, is_default, encoded), encoded, config, inputs
    )


def _new_tokens(model: nn.Module, config: Any, length: int, is_default: bool, encoded: bool) -> int:
    """As transformers' `_prepare_generated_length` decides it."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    start = 1 if encoded else length
    most = int(config.max_length)
    if is_default:
        positions = getattr(model.config, "max_position_embeddings", None)
        most = most + start if positions is None else min(most + start, int(positions))
    return max(most - start, 0)


_ALIKE = ("dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window")


def cache_matters(config: Any, *, encoded: bool) -> bool:
    """Whether a generation config asks for a cache whose answers or place differ, or that is returned.

    Args:
        config: Complete.
        encoded: The new tokens listen to an encoder; upon a static cache some of those models (LED) say
            something else.
    """
    kind = config.cache_implementation
    if kind is None:
        return False
    return encoded or kind not in _ALIKE or bool(config.return_dict_in_generate)


def unread_cache(model: nn.Module, request: Request) -> dict[str, Any]:
    """An argument for which transformers makes no cache: of 32 layers that takes 0.3 ms, and nobody reads it.

    Args:
        model: The model.
        request: A call that the engine road serves.
    """
    from transformers import DynamicCache, GenerationMixin

    kind: Any = type(model)
    if (
        request.encoded
        or request.config.cache_implementation is not None  # refused beside a cache
        or kind.generate is not GenerationMixin.generate
        or "mamba" in kind.__name__.lower()  # there it has another name
        or kind._prepare_cache_for_generation is not GenerationMixin._prepare_cache_for_generation
        or not kind._supports_default_dynamic_cache()
        or "past_key_values" not in _signature(kind.prepare_inputs_for_generation).parameters
    ):
        return {}
    return {"past_key_values": DynamicCache()}


def move_stop_strings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Turn stop strings into the criterion that transformers makes of them.

    transformers does not pass the tokenizer on where the decoding method is custom, and so cannot do it
    itself.
    """
    if kwargs.get("stop_strings") is None:
        return dict(kwargs)
    from transformers import StoppingCriteriaList, StopStringCriteria

    moved = {key: value for key, value in kwargs.items() if key != "stop_strings"}
    criterion = StopStringCriteria(tokenizer=kwargs["tokenizer"], stop_strings=kwargs["stop_strings"])
    moved["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    return moved


def why_not_packed(model: nn.Module, request: Request, kwargs: Mapping[str, Any]) -> str | None:
    """Why a call of `generate` cannot take the engine road, or None if it can.

    Args:
        model: The causal language model.
        request: The call as it was read.
        kwargs: The call.
    """
    if request.prompt is None and not request.encoded:
        return "there are no token ids"
    if "generate" in vars(model):
        return "the model has a generate of its own"
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return "autocast is on"
    for name in (
        "assistant_model",
        "custom_generate",
        "inputs_embeds",
        "past_key_values",
        "position_ids",
        "synced_gpus",
        "encoder_outputs",
    ):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            return f"{name} is given"
    config, inputs = request.config, request.inputs
    mode = config.get_generation_mode(None)
    if mode.value not in MODES:
        return f"the mode is {mode.value}"
    if mode.value in BEAMS and not searches(model):
        return "the model has a beam search of its own"
    if mode.value in BEAMS and config.return_dict_in_generate:
        return "return_dict_in_generate is set beside beams"
    own = _OWN_OF_PAIRS if request.encoded else _OWN
    extra = [
        name for name, value in inputs.items() if name not in own and value is not None and value is not False
    ]
    if extra:
        return f"the model takes {', '.join(extra)}"
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
        return "stop_strings stand in a generation config, or come without a tokenizer"
    mask = kwargs.get("attention_mask")
    mask = _inferred_mask(request) if mask is None else mask
    if mask is not None and not request.encoded and not _is_left_padded(mask):
        return "the attention mask has gaps"
    if request.encoded and isinstance(mask, Tensor) and not bool((mask != 0).any(-1).all()):
        return "the attention mask leaves a row nothing to see"  # where masks are added it sees everything
    return None


def repeats_generate(model: nn.Module) -> bool:
    """Whether a model of speech calls transformers' `generate` out of its own, once for each segment."""
    from transformers import GenerationMixin

    own = type(model).generate  # type: ignore[attr-defined]
    return own is not GenerationMixin.generate and "input_features" in inspect.signature(own).parameters


def why_not_repeated(model: nn.Module, request: Request, kwargs: Mapping[str, Any]) -> str | None:
    """Why no call that such a model makes may take the engine road, or None: `Loop` sees to each.

    Args:
        model: One that `repeats_generate`.
        request: The call as it was read.
        kwargs: The call.
    """
    if "generate" in vars(model):
        return "the model has a generate of its own"
    mode = request.config.get_generation_mode(None).value
    if mode not in MODES:
        return f"the mode is {mode}"
    # The last one keeps all arguments of the call, to make it again.
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
    """Why the engine road would not say what the model says by now, or None if it does.

    Args:
        model: The model, which its owner may have trained, hooked into or rebuilt since.
        runner: Made of it.
    """
    if model.training:
        return "the model is in training mode"
    # Within the layers `is_untouched` looks, at every one of the modules that were there.
    if listens_everywhere() or any(map(is_hooked, modules_of(model, runner.frame.layers))):
        return "someone listens to the model's parts by hooks"
    changed = runner.frame.replaced(model)
    if changed is not None:
        return f"{changed or 'the model'} was replaced, or its forward was"
    if not runner.frame.keeps_scale:
        return "the multiplier of the token embedding was changed"
    for layer, block in zip(runner.frame.layers, runner.blocks, strict=True):
        if not is_injected(layer) or injected_state(layer).block is not block:
            return "a layer was replaced"
        if "forward" in vars(layer) or not is_untouched(layer):
            return "a part of a layer, its code or a tensor was replaced"
    return None


def why_not_so_long(model: nn.Module, runner: Runner, request: Request) -> str | None:
    """Why the engine road cannot go on for as many tokens as are asked for, or None if it can.

    Args:
        model: Its config decides what transformers' cache keeps.
        runner: Knows how far positions reach, and where the original starts again.
        request: The call as it was read.
    """
    most, restart = runner.frame.max_positions, runner.frame.spec.restart
    length = _decoded(request) if request.encoded else request.length
    total = length + request.new_tokens
    if most is not None and total > most:
        return f"{total} tokens pass the position embedding's {most}"
    if restart is not None and length <= restart < total:
        return f"the original starts again at {restart} tokens"
    kept = _kept_tokens(model, runner)
    if kept is not None and total > kept:
        return f"transformers' cache keeps {kept} tokens, and a layer sees another number"
    padding = runner.frame.spec.pos_padding
    if padding is not None and request.encoded and _starts_with(request, padding):
        return "the decoder's prompt has padding, which has no position"
    return None


def _starts_with(request: Request, token: int) -> bool:
    """Whether a token is in what a decoder is given to begin with."""
    given = request.inputs.get("decoder_input_ids")
    start = request.config.decoder_start_token_id
    starts = start if isinstance(start, list) else [start]
    return isinstance(given, Tensor) and (token in starts or bool((given == token).any()))


def _decoded(request: Request) -> int:
    """Tokens that a decoder starts from, at most: those that are given, and the one that begins."""
    given = request.inputs.get("decoder_input_ids")
    return 1 + (int(given.shape[-1]) if isinstance(given, Tensor) else 0)


def _kept_tokens(model: nn.Module, runner: Runner) -> int | None:
    """Least window of the layers of transformers' cache that is not the window of their layer, if any.

    The cache follows the config: it has windows for layers of classes that do not read `sliding_window`.
    """
    from transformers import DynamicCache

    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
    if getattr(config, "sliding_window", None) is None:
        return None
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    # A window of one token is none: the cache keeps the last `window - 1`, and of those slices keeps all.
    seen = [None if block.spec.window == 1 else block.spec.window for block in runner.blocks]
    differ = (kept for kept, own in zip(windows, seen, strict=False) if kept is not None and kept != own)
    return min(differ, default=None)


def _inferred_mask(request: Request) -> Tensor | None:
    """The mask that transformers infers where none is given; None where it takes all tokens as they are."""
    ids, pad, ends = request.prompt, request.config.pad_token_id, request.config.eos_token_id
    pad = pad.item() if isinstance(pad, Tensor) else pad
    ends = ends.flatten().tolist() if isinstance(ends, Tensor) else ends
    if ids is None or pad is None or pad in (ends if isinstance(ends, list | tuple) else (ends,)):
        return None
    mask = ids != pad
    return None if bool(mask.all()) else mask


def _is_left_padded(mask: Tensor) -> bool:
    """Whether every row is zeros, then ones to its end; other numbers count as so many positions."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    real = mask != 0
    ones = bool((mask == real).all())
    return ones and bool(real[:, -1].all()) and bool((real[:, 1:] | ~real[:, :-1]).all())
