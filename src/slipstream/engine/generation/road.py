"""Whether a call of `generate` takes the engine road, and with which helpers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from slipstream.engine.generation.assisted import ASSISTED
from slipstream.engine.generation.draft import Drafter, drafts
from slipstream.engine.generation.refusals import (
    why_not_intact,
    why_not_kept,
    why_not_packed,
    why_not_readable,
    why_not_repeated,
    why_not_so_long,
)
from slipstream.engine.generation.request import Request, repeats_generate
from slipstream.engine.generation.resumed import why_not_resumed
from slipstream.engine.generation.runner import Runner
from slipstream.parallel import Axis

__all__ = ["helpers_of", "why_not_the_road"]


def why_not_the_road(
    model: nn.Module, runner: Runner, request: Request, kwargs: Mapping[str, Any], ranks: Axis
) -> str | None:
    """Return why a call runs transformers' own loops, or None if it takes the engine road.

    Args:
        model: The model, with fused layers.
        runner: Runs the model over packed tokens.
        request: The call as read by `read_request`.
        kwargs: The call's arguments.
        ranks: The ranks that share the model.
    """
    if repeats_generate(model):
        return why_not_repeated(model, request, kwargs) or why_not_intact(model, runner)
    assistant = kwargs.get("assistant_model")
    if ranks.size > 1 and request.config.get_generation_mode(assistant).value == ASSISTED:
        return "several ranks share the model, and a draft helps"
    if ranks.size > 1 and kwargs.get("past_key_values") is not None:
        return "several ranks share the model, and a cache is given"
    typed = runner.frame.spec.type_embed is not None
    return (
        why_not_readable(runner, request)
        or why_not_packed(model, request, kwargs, takes_over=runner.takes_over, typed=typed)
        or why_not_so_long(model, runner, request)
        or why_not_intact(model, runner)
        # These may run a part of the model, to see what transformers keeps of it.
        or why_not_kept(model, runner, request, assistant)
        or why_not_resumed(model, runner, request, kwargs)
    )


def helpers_of(
    request: Request,
    kwargs: Mapping[str, Any],
    as_engine: Callable[[Any], tuple[Runner, Callable[..., Any]] | None],
) -> dict[str, Any]:
    """Return the arguments of transformers' assisted decoding that it does not pass to a custom method.

    Args:
        request: The call as read by `read_request`.
        kwargs: The call's arguments.
        as_engine: Returns the runner of an assistant that is an engine and what drafts with it, as of
            `Drafter`; None for any other assistant.
    """
    names = ("assistant_model", "tokenizer", "assistant_tokenizer")
    helpers = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    engine = as_engine(helpers.get("assistant_model"))
    if engine is None:
        return helpers
    assistant = helpers["assistant_model"]
    if "assistant_tokenizer" in helpers and request.config.do_sample:
        # transformers then replaces the assistant's head by the part that both vocabularies have.
        helpers["assistant_model"] = assistant.module
    elif drafts(engine[0]):
        helpers["assistant_model"] = Drafter(assistant, engine[1], request.length + request.new_tokens)
    return helpers
