"""Vision and audio models: their own forward runs the prompt, and the engine road continues from its cache.

How images and audio enter a prompt, and which positions attend to which within it, differs between models.
Later steps usually consist of tokens only. Whether that is so, and at which positions, is read from the
inputs that the model prepares for the first step after the prompt.

Shapes: B batch, S prompt (padded), V vocabulary, K kv heads, N cached tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.engine.frames import text_config
from slipstream.engine.generation.runner import Runner
from slipstream.ops.recurrence import final_state
from slipstream.spec import BlockSpec, Recurrence, lender_of

__all__ = ["Begun", "Kept", "begin", "kept_by", "last_tokens", "layers_by_block"]

_SILENT = frozenset({"use_cache", "return_dict", "logits_to_keep", "cache_position", "past_key_values"})
"""Inputs of a step that do not affect what its token computes."""


class Kept(NamedTuple):
    """What a layer of transformers' cache keeps, in the form of the engine's.

    Attributes:
        pages: Keys and values, `(B, K, N, D)` each; only the last N tokens if the layer keeps no more. None
            if it has no attention.
        states: `(B, S)` float32, the states of its recurrence; None without one.
    """

    pages: tuple[Tensor, Tensor] | None
    states: Tensor | None


@dataclass(frozen=True)
class Begun:
    """The results of prompts that have run.

    Attributes:
        layers: What each layer keeps.
        logits: Logits after the prompts, `(B, V)` float32.
        shifts: For each row, what to add to the engine road's count of tokens to get the model's position.
    """

    layers: Sequence[Kept]
    logits: Tensor
    shifts: Sequence[int]


def begin(model: Any, runner: Runner, ids: Tensor, inputs: Mapping[str, Any]) -> Begun | None:
    """Run prompts by the model's own forward.

    Args:
        model: A model with vision or audio inputs, or one that is given embeddings.
        runner: The engine road of its language model.
        ids: `(B, S)` int64, left-padded; S may be less than there are embeddings, or 0.
        inputs: What transformers would pass besides `ids`; not changed.

    Returns:
        None if the next step needs more than a token; the model's own loop then starts from the beginning.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=text_config(model, runner.frame.spec.root))
    given = {**inputs, "past_key_values": cache}
    first = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **given)
    answer = model(**first, return_dict=True)
    later = model._update_model_kwargs_for_generation(answer, given, is_encoder_decoder=False)
    longer = torch.cat([ids, ids.new_zeros(len(ids), 1)], dim=1)  # which token is appended does not matter
    step = model.prepare_inputs_for_generation(longer, next_sequence_length=1, **later)
    embeds = inputs.get("inputs_embeds")
    length = ids.shape[1] if embeds is None else embeds.shape[1]
    shifts = _shifts(model, step, length, inputs.get("attention_mask"))
    layers = kept_by(cache, runner, len(ids), length)
    return None if shifts is None or layers is None else Begun(layers, _last(answer), shifts)


def _last(answer: Any) -> Tensor:
    logits: Tensor = answer.logits[:, -1]
    return logits.float()


def _shifts(model: nn.Module, step: Mapping[str, Any], length: int, mask: Tensor | None) -> list[int] | None:
    """Return each row's position shift, or None if the next step needs more than tokens and positions."""
    rows = step["input_ids"].shape[0]
    real = [length] * rows if mask is None else (mask != 0).sum(-1).tolist()
    places: list[int] | None = None
    for name, value in step.items():
        if value is None or value is False or name in _SILENT:
            continue
        if name == "input_ids" and value.shape == (rows, 1):
            continue
        if name == "attention_mask" and isinstance(value, Tensor) and value.shape == (rows, length + 1):
            continue
        if name == "mm_token_type_ids" and not bool(value.any()):
            continue
        if name != "position_ids":
            return None
        places = _places(value, rows)
        if places is None:
            return None
    if places is None:
        # Without position ids the model counts the tokens in its cache, padding included.
        counts_on = any(getattr(module, "rope_deltas", None) is not None for module in model.modules())
        return None if counts_on or min(real) < length else [0] * rows
    return [place - count for place, count in zip(places, real, strict=True)]


def _places(positions: Tensor, rows: int) -> list[int] | None:
    """Return the position of each row's one token; None if its axes (time, height, width) differ."""
    axes = positions if positions.dim() == 3 else positions[None]
    axes = axes[1:] if axes.shape[0] == 4 else axes  # the first of four is the one that masks are made from
    if axes.shape[1:] not in ((rows, 1), (1, 1)) or not bool((axes == axes[:1]).all()):
        return None
    return [int(place) for place in axes[0, :, 0].expand(rows)]


def kept_by(cache: Any, runner: Runner, rows: int, seen: int) -> list[Kept] | None:
    """Return what each layer keeps; None if the cache has another form, or fewer tokens than are read.

    Args:
        cache: A cache of transformers, of `rows` sequences of `seen` tokens, padding included.
        runner: Its blocks describe the layers.
        rows: B.
        seen: N.
    """
    specs = [block.spec for block in runner.blocks]
    layers = layers_by_block(cache, specs)
    if layers is None:
        return None
    kept: list[Kept] = []
    for index, spec in enumerate(specs):
        if index not in layers:
            kept.append(kept[lender_of(specs, index)])
            continue
        pages = _pages(layers[index], spec, rows, seen) if spec.cached else None
        states = None if spec.recurrence is None else _states(layers[index], spec.recurrence, rows)
        if (pages is None and spec.cached) or (states is None and spec.recurrence is not None):
            return None
        kept.append(Kept(pages, states))
    return kept


def layers_by_block(cache: Any, specs: Sequence[BlockSpec]) -> dict[int, Any] | None:
    """Return a cache's layers by the index of their block; None if their numbers do not fit."""
    own = [index for index, spec in enumerate(specs) if spec.sharing != "borrows"]
    # Versions of transformers differ in whether layers that borrow have a place in the cache, an empty one.
    places = own if len(cache.layers) == len(specs) else range(len(own))
    if len(cache.layers) not in (len(specs), len(own)):
        return None
    return {index: cache.layers[place] for index, place in zip(own, places, strict=True)}


def _pages(layer: Any, spec: BlockSpec, rows: int, seen: int) -> tuple[Tensor, Tensor] | None:
    """Return keys and values of a layer in transformers' cache; None if they have another form there."""
    reach = spec.chunk if spec.window is None else spec.window
    least = seen if reach is None else min(seen, reach - 1)
    parts = []
    for name, (heads, width) in zip(("keys", "values"), spec.cached, strict=True):
        part = getattr(layer, name, None)
        repeats = spec.heads // heads if spec.cache_repeated else 1
        if not isinstance(part, Tensor) or part.dim() != 4 or not least <= part.shape[2] <= seen:
            return None
        if (*part.shape[:2], part.shape[3]) != (rows, repeats * heads, width):
            return None
        parts.append(part[:, ::repeats])
    return parts[0], parts[1]


def _states(layer: Any, spec: Recurrence, rows: int) -> Tensor | None:
    """Return the states `(B, S)` of a layer in transformers' cache; None if they have another form there."""
    inputs = getattr(layer, "conv_states", None)
    inputs = inputs.get(0) if isinstance(inputs, dict) else None
    if not isinstance(inputs, Tensor) or inputs.shape != (rows, spec.channels, spec.width):
        return None
    parts = [inputs[:, :, 1:].mT]  # the first column has left the convolution's reach
    wanted = final_state(torch.empty(rows, spec.state, dtype=torch.float32, device="meta"), spec)
    if wanted is not None:
        state = getattr(layer, "recurrent_states", {}).get(0)
        # A state space has the last two dimensions the other way round.
        state = state.mT if isinstance(state, Tensor) and spec.rule in ("space", "selective") else state
        if not isinstance(state, Tensor) or state.shape != wanted.shape:
            return None
        parts.append(state)
    return torch.cat([part.float().flatten(1) for part in parts], dim=1)


def last_tokens(part: Tensor, count: int) -> Tensor:
    """Return the last `count` tokens of keys or values `(K, N, D)` as `(count, K, D)`, zeros if missing."""
    rows = part.transpose(0, 1)[-count:]
    return torch.nn.functional.pad(rows, (0, 0, 0, 0, count - rows.shape[0], 0))
