"""States of recurrences in caches of transformers, written as the layers' own code would have written them.

Shapes: B batch, S numbers of a state, D channels of the convolution, W its width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from slipstream.model.fused.begun import MixerLayer, is_fresh, kept_as, put
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.ops.recurrence import final_state, inputs_of

__all__ = ["begins_in", "keeps_state", "write_state"]


def keeps_state(layer: nn.Module, fresh: Any) -> bool:
    """Whether `write_state` can store the state of a layer's recurrence.

    Args:
        layer: A layer of a model, injected or not.
        fresh: An empty cache of transformers, made from the model's config; not changed.
    """
    own = _mixer_of(layer)
    if own is None or not begins_in(layer, fresh, 1):
        return False
    state = injected_state(layer)
    return state.begins is not None and kept_as(state.begins, state.block, own, fresh) is not None


def begins_in(layer: nn.Module, cache: Any, rows: int) -> bool:
    """Whether a cache has a place for `rows` states of an injected layer, which is still empty."""
    return is_fresh(cache, injected_state(layer).index, rows)


def write_state(layer: nn.Module, cache: Any, states: Tensor) -> None:
    """Store the state of a layer's recurrence in a cache.

    The cache has the last W inputs of the convolution, of which the next token reads W - 1: the other one is
    zero.

    Args:
        layer: A layer for which `keeps_state` was true.
        cache: A cache of transformers, empty or with older states; updated in place.
        states: `(B, S)` float32.
    """
    own, begins = _mixer_of(layer), injected_state(layer).begins
    kept = None if own is None or begins is None else begins.kept.get(own.key)
    if own is None or kept is None:
        raise AssertionError("a state is written for a layer that was not checked")
    inputs, state = inputs_of(states, own.recurrent.spec), final_state(states, own.recurrent.spec)
    if begins_in(layer, cache, len(states)):
        put(cache, own.index, kept, inputs, state)
        return
    there = cache.layers[own.index]
    there.conv_states[0].copy_(inputs)
    if state is not None:
        there.recurrent_states[0].copy_(state.mT if kept.turned else state)


def _mixer_of(layer: nn.Module) -> MixerLayer | None:
    if not is_injected(layer):
        return None
    state = injected_state(layer)
    if state.mixer is None or state.block.part is None:
        return None
    return MixerLayer(layer.get_submodule(state.mixer.part), state.mixer, state.block.part, state.index)
