"""Reads a call of `generate` before it runs: prompt, length and settings.

Shapes: B batch, S prompt (padded).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor, nn

from slipstream.engine.frames import decoder_of
from slipstream.engine.generation.assisted import ASSISTED
from slipstream.engine.generation.beams import BEAMS

__all__ = [
    "Request",
    "by_name",
    "by_position",
    "cache_matters",
    "longest",
    "move_stop_strings",
    "own_settings",
    "read_request",
    "repeats_generate",
    "unread_cache",
]

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
        prompt: `(B, S)` token ids, or None if the call has none.
        length: Tokens in the prompt, padding included; 1 if there is no prompt and generation starts from
            one token.
        new_tokens: Number of new tokens that the call requests.
        encoded: The prompt is an encoder's input, so the new tokens do not follow it.
        config: The complete generation config.
        inputs: The remaining arguments, which are inputs of the model.
    """

    prompt: Tensor | None
    length: int
    new_tokens: int
    encoded: bool
    config: Any
    inputs: Mapping[str, Any]


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the model's `generate`, all by name.

    An argument that is absorbed by `*args` gets the name of that position in transformers' `generate`.

    Raises:
        TypeError: Too many positional arguments, or one that is also given by name.
    """
    generate: Any = model.generate
    if (names := _places(generate)) is not None:
        if len(args) > len(names):
            raise TypeError(f"generate takes {len(names)} positional arguments, and {len(args)} were given")
        if twice := [name for name in names[: len(args)] if name in kwargs]:
            raise TypeError(f"generate got multiple values for argument {twice[0]!r}")
        return {**dict(zip(names, args, strict=False)), **kwargs}
    plain = getattr(generate, "__func__", generate)
    own = () if plain is generate else (model,)
    bound = _signature(plain).bind(*own, *args, **kwargs)
    others = bound.kwargs  # arguments after the positional ones, and those that `**kwargs` takes
    named = dict(zip(bound.signature.parameters, bound.args, strict=False))
    for name in list(named)[: len(own)]:
        del named[name]
    return {**named, **others}


def by_position(model: nn.Module, count: int) -> Callable[..., Any]:
    """Return the model's `generate` as a function that is called with keyword arguments only.

    If it takes `*args`, the first `count` arguments are passed on by position.

    Args:
        model: The model.
        count: Number of positional arguments in the call that `by_name` read.
    """
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    names = (_places(generate) or ())[:count]
    if not names:
        return generate

    def placed(**given: Any) -> Any:
        return generate(*[given.pop(name) for name in names], **given)

    return placed


def _places(generate: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of positional arguments for a `generate` that takes `*args`; None for any other."""
    from transformers import GenerationMixin

    plain = getattr(generate, "__func__", generate)
    own = list(_signature(plain).parameters.values())[0 if plain is generate else 1 :]
    if all(one.kind is not inspect.Parameter.VAR_POSITIONAL for one in own):
        return None
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    whole = list(_signature(GenerationMixin.generate).parameters.values())[1:]
    named, theirs = ([one.name for one in given if one.kind in by_place] for given in (own, whole))
    return (*named, *theirs[len(named) :])


@functools.lru_cache(maxsize=32)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature; cached, because reading one takes 0.1 ms."""
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
    if embeds is not None and isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 0:
        ids = None  # an empty tensor, to which new tokens are appended: the prompt is `inputs_embeds`
    prompt = ids if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() else None
    # Audio samples or spectrograms are not tokens, though they may come as `inputs`.
    tokens = None if isinstance(ids, Tensor) and ids.is_floating_point() else ids
    entry = next((t for t in (tokens, embeds) if isinstance(t, Tensor) and t.dim() > 1), None)
    length = 1 if entry is None else int(entry.shape[1])
    owners: tuple[Any, ...] = (given, model.generation_config)
    is_default = settings.get("max_length") is None and all(
        owner is None or owner.max_length is None for owner in owners
    )
    encoded = bool(getattr(model.config, "is_encoder_decoder", False))
    new_tokens = _new_tokens(model, config, length, is_default, encoded)
    most = longest(kwargs.get("stopping_criteria") or ())
    mode = config.get_generation_mode(kwargs.get("assistant_model")).value
    if most is not None and mode not in (*BEAMS, ASSISTED):  # those use the config's
        new_tokens = max(most - (1 if encoded else length), 1)
    return Request(prompt, length, new_tokens, encoded, config, inputs)


def own_settings(model: Any) -> dict[str, Any]:
    """Return a model's own generation settings, which apply where a call gives none."""
    settings = getattr(model, "generation_config", None)
    own = {} if settings is None else settings.to_dict()
    return {f"generation_config.{name}": value for name, value in own.items()}


def longest(criteria: Iterable[Any]) -> int | None:
    """Return the maximum length by stopping criteria, prompt included; it overrides the config's."""
    from transformers.generation.stopping_criteria import MaxLengthCriteria

    return min((int(one.max_length) for one in criteria if type(one) is MaxLengthCriteria), default=None)


_DEFAULT_LENGTH = 20
"""transformers' default, which it fills in later where a model (Whisper) prepares its config itself."""


def _new_tokens(model: nn.Module, config: Any, length: int, is_default: bool, encoded: bool) -> int:
    """Return the number of new tokens, as transformers' `_prepare_generated_length` determines it."""
    if config.max_new_tokens is not None:
        return int(ceil(config.max_new_tokens))  # a fractional limit ends generation once it is exceeded
    start = 1 if encoded else length
    most = _DEFAULT_LENGTH if config.max_length is None else int(ceil(config.max_length))
    if is_default:
        positions = getattr(model.config, "max_position_embeddings", None)
        most = most + start if positions is None else min(most + start, int(positions))
    return max(most - start, 0)


_ALIKE = ("dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window")


def cache_matters(config: Any, *, encoded: bool) -> bool:
    """Whether a generation config requests a cache that changes results or memory placement, or is returned.

    Args:
        config: The complete generation config.
        encoded: The model is an encoder-decoder; with a static cache some of those (LED) compute something
            else.
    """
    kind = config.cache_implementation
    if kind is None:
        return False
    return encoded or kind not in _ALIKE or bool(config.return_dict_in_generate)


def unread_cache(model: nn.Module, request: Request) -> dict[str, Any]:
    """Return an empty cache as a `generate` argument, so that transformers makes none; {} if not possible.

    Nothing reads that cache, and making one for 32 layers takes 0.3 ms.

    Args:
        model: The model.
        request: A call that the engine road serves.
    """
    from transformers import DynamicCache, GenerationMixin

    kind: Any = type(model)
    if (
        request.encoded
        or request.config.cache_implementation is not None  # transformers refuses it together with a cache
        or kind.generate is not GenerationMixin.generate
        or "mamba" in kind.__name__.lower()  # there the argument has another name
        or kind._prepare_cache_for_generation is not GenerationMixin._prepare_cache_for_generation
        or not kind._supports_default_dynamic_cache()
        or "past_key_values" not in _signature(kind.prepare_inputs_for_generation).parameters
    ):
        return {}
    return {"past_key_values": DynamicCache()}


def move_stop_strings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace stop strings by the stopping criterion that transformers would make of them.

    transformers cannot do so itself: it does not pass the tokenizer on to a custom decoding method.
    """
    if kwargs.get("stop_strings") is None:
        return dict(kwargs)
    from transformers import StoppingCriteriaList, StopStringCriteria

    moved = {key: value for key, value in kwargs.items() if key != "stop_strings"}
    criterion = StopStringCriteria(tokenizer=kwargs["tokenizer"], stop_strings=kwargs["stop_strings"])
    moved["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    return moved


def repeats_generate(model: nn.Module) -> bool:
    """Whether a model's own `generate` calls transformers': once for each segment, or its decoder's."""
    from transformers import GenerationMixin

    own = type(model).generate  # type: ignore[attr-defined]
    if own is GenerationMixin.generate:
        return False
    return bool(decoder_of(model)) or "input_features" in inspect.signature(own).parameters
