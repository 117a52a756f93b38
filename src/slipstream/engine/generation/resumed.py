"""Generation that continues from a cache of transformers, which it extends in place.

The engine's own cache is filled from the given one, the tokens that it lacks run as any prompt does, and in
the end the keys and values of all that have run are appended to the given one, as the model's forwards would
have done one by one.

Shapes: B batch, S prompt (padded), N cached tokens (padded), K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from slipstream.engine.generation.export import why_not_exported
from slipstream.engine.generation.multimodal import kept_by, layers_by_block
from slipstream.engine.generation.request import Request
from slipstream.engine.generation.runner import Runner
from slipstream.engine.generation.stand_in import is_transformers
from slipstream.model.fused.states import begins_in
from slipstream.spec import BlockSpec

__all__ = ["prepares_by_default", "why_not_resumed"]

_PREPARES = "prepare_inputs_for_generation"
_METHODS = ("_prefill", "_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation")
"""Methods of a model that decide, with the one above, which tokens follow a cache, and at which positions."""

_ALIKE = ("BambaForCausalLM", "CTRLLMHeadModel", "FalconH1ForCausalLM", "NemotronHForCausalLM")
"""Models of transformers whose own method of that name changes nothing that matters here."""

_RESTARTS = ("Phi3ForCausalLM", "PhimoeForCausalLM")
"""Those that may drop the cache, once there are more tokens than `original_max_position_embeddings`."""

_PLAIN = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")
"""Layers of a cache that do what their names say; the last, which not all versions have, keeps nothing."""


def why_not_resumed(
    model: nn.Module, runner: Runner, request: Request, kwargs: Mapping[str, Any]
) -> str | None:
    """Return why a call cannot continue from the cache that it is given; None if it can, or is given none.

    Args:
        model: The causal language model.
        runner: Runs the model over packed tokens.
        request: The call as read by `read_request`.
        kwargs: The call's arguments.
    """
    cache = kwargs.get("past_key_values")
    if cache is None:
        return None
    config, prompt = request.config, request.prompt
    if config.get_generation_mode(kwargs.get("assistant_model")).value not in ("greedy_search", "sample"):
        return "a cache is given to a search, or to a model with an assistant"
    if config.num_return_sequences > 1:
        return "a cache is given, and several sequences per prompt are to be returned"
    if kwargs.get("inputs_embeds") is not None:
        return "a cache is given, and embeddings"
    if runner.takes_over or request.encoded or prompt is None or not prepares_by_default(model, request):
        return "a cache is given to a model that prepares its inputs in a way of its own"
    specs = [block.spec for block in runner.blocks]
    if not any(spec.cached for spec in specs):
        return "a cache is given in which no layer counts tokens"
    if any(spec.recurrence is not None and spec.recurrence.rule == "selective" for spec in specs):
        return "a cache is given, and the original forgets the states in it where several tokens follow"
    if (unknown := why_not_exported(model, runner)) is not None:
        return f"a cache is given, and {unknown}"
    if any(spec.alibi is not None for spec in specs):
        return "a cache is given, and biases by position are made from the mask of the new tokens"
    if runner.frame.spec.restart is not None or runner.frame.angles_share_a_length:
        return "a cache is given, and rotary angles depend on the longest sequence"
    if not _is_plain(cache):
        return f"a {type(cache).__name__} is given, or one with layers that do not just grow"
    mask, pad = request.inputs.get("attention_mask"), config.pad_token_id
    hidden = mask == 0 if isinstance(mask, Tensor) else prompt == (-1 if pad is None else pad)
    return _why_not_read(cache, runner, prompt, hidden)


def prepares_by_default(model: nn.Module, request: Request) -> bool:
    """Whether a model prepares its inputs as transformers' generation does by default.

    Args:
        model: The causal language model.
        request: The call as read by `read_request`.
    """
    if not is_transformers(model, *_METHODS):
        return False
    name = type(model).__name__
    known = type(model).__module__.startswith("transformers.models.")
    if name in _RESTARTS:
        most = getattr(model.config, "original_max_position_embeddings", None)
        known &= most is None or request.length + request.new_tokens <= most
    return is_transformers(model, _PREPARES) or (known and name in (*_ALIKE, *_RESTARTS))


def _is_plain(cache: Any) -> bool:
    """Whether a cache only has layers that append keys and values, up to a window or not, or have a state."""
    from transformers import DynamicCache, cache_utils

    kinds = [getattr(cache_utils, name, None) for name in _PLAIN]
    return (
        type(cache) is DynamicCache
        and not getattr(cache, "offloading", False)
        and all(type(layer) in kinds for layer in cache.layers)
        and not any(getattr(layer, "record_past", False) for layer in cache.layers)
    )


def _why_not_read(cache: Any, runner: Runner, prompt: Tensor, hidden: Tensor) -> str | None:
    """Return why a plain cache cannot be what has run of the prompts `(B, S)`; None if it can.

    Args:
        cache: The caller's.
        runner: Runs the model.
        prompt: `(B, S)` int64.
        hidden: `(B, S)`, where the prompts are padded.
    """
    specs, seen, rows = [block.spec for block in runner.blocks], int(cache.get_seq_length()), len(prompt)
    recurring = [index for index, spec in enumerate(specs) if spec.recurrence is not None]
    if seen >= prompt.shape[1]:
        return "the cache that is given has all tokens of the prompt"
    layers = layers_by_block(cache, specs) if cache.layers or recurring else {}
    if layers is None or any(_forgets(layer, specs[index]) for index, layer in layers.items()):
        return "the cache that is given has other windows or numbers of layers than the model"
    held = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    if any(layer.get_seq_length() != seen for layer in held):
        return "the cache that is given has layers of different lengths"
    if seen == 0:
        fresh = all(begins_in(runner.frame.layers[index], cache, rows) for index in recurring)
        return None if fresh else "the cache that is given has states, or no place for them"
    if recurring and bool(hidden[:, :seen].all(-1).any()):
        return "the mask hides all tokens of a row that its states in the cache were made of"
    return _why_not_kept(cache, runner, rows, seen)


def _forgets(layer: Any, spec: BlockSpec) -> bool:
    """Whether a layer of a cache keeps fewer tokens than its block attends to."""
    kept, reach = getattr(layer, "sliding_window", None), spec.chunk if spec.window is None else spec.window
    return kept is not None and (reach is None or kept < reach or kept == 1)  # one of 1 forgets nothing


def _why_not_kept(cache: Any, runner: Runner, rows: int, seen: int) -> str | None:
    """Return why the tensors in a cache of N tokens cannot be those of the engine's; None if they can."""
    layers = kept_by(cache, runner, rows, seen)
    if layers is None:
        return "the cache that is given has other shapes than the model's"
    device = runner.frame.embed._parameters["weight"].device
    for layer in layers:
        for part in layer.pages or ():
            if part.dtype != runner.dtype or part.device != device or part.requires_grad:
                return f"the cache that is given is {part.dtype} on {part.device}, or it is being trained"
    return None
