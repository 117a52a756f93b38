"""The state that a fused layer carries, and the check that the layer is unchanged since it was fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from slipstream.families import OwnAttention, OwnBias, OwnCourse, OwnMixer
from slipstream.model.block.block import Block
from slipstream.model.fused.layer_changes import Parts, is_intact
from slipstream.model.fused.links import Link, all_hold
from slipstream.spec import Role
from slipstream.weights.recipe import Plan

if TYPE_CHECKING:
    from slipstream.model.fused.begun import Begins

__all__ = ["STATE", "Injected", "injected_state", "is_injected", "is_untouched"]

STATE = "_slipstream"
"""Name of the attribute that holds a fused layer's state."""


def _as_it_is(_: Tensor) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class Injected:
    """State of an injected layer besides its original parts.

    Attributes:
        original: The layer's original class.
        block: The fused block.
        plans: How the block's tensors are made of the layer's own; on several ranks, for this rank's part.
        whole: The plans for the whole layer, on all ranks together.
        index: The layer's index in the cache.
        returns: Turns what `run_block` returns into what the original class returns.
        rope_table: Path of the layer's own `[sin | cos]` table, if the model passes none.
        rotary: Path of the layer's own rotary module, if the model passes no angles.
        bool_masks: The model passes boolean masks; if it does not, only the original code can interpret one.
        forward: The original class's `forward`.
        relative: Path of the module that computes relative position biases, if there is one.
        parts: The modules inside the layer when it was injected.
        links: The layer's parameters as the block holds them.
        bias: Computes what the layer itself adds to the scores, if anything.
        attention: The family's own attention, where the spec has `own_attention`.
        mixer: The module that replaces attention, if any.
        feeder: The module that replaces the feed-forward, if any.
        course: The family's order of the branches, where the spec has a `course`.
        unread: Names of arguments that nothing reads.
        begins: How the layer begins sequences in one call, if its mixer has a recurrence.
        scope: Makes the context of a call with states `(B, S, C)`: torch's threads, above all.
        declined: Number of calls that the original code served.
    """

    original: type[nn.Module]
    block: Block
    plans: Mapping[Role, Plan]
    whole: Mapping[Role, Plan]
    index: int
    returns: Callable[..., Any]
    rope_table: str | None
    bool_masks: bool
    forward: Callable[..., Any]
    relative: str | None = None
    rotary: str | None = None
    parts: Parts = Parts()
    links: tuple[Link, ...] = ()
    bias: OwnBias | None = None
    attention: OwnAttention | None = None
    mixer: OwnMixer | None = None
    feeder: OwnMixer | None = None
    course: OwnCourse | None = None
    unread: frozenset[str] = frozenset()
    begins: Begins | None = None
    scope: Callable[[Tensor], AbstractContextManager[None]] = _as_it_is
    declined: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the block depends on the call's arguments alone, and on no module or table of the layer."""
        own = (self.rope_table, self.relative, self.rotary, self.bias, self.mixer, self.feeder, self.course)
        return own == (None,) * len(own)

    @property
    def reads(self) -> frozenset[str]:
        """Names of arguments that only a part of the layer reads, or nothing."""
        own = (self.bias, self.attention, self.mixer, self.feeder, self.course)
        return self.unread.union(*(one.reads for one in own if one is not None))


def is_injected(module: nn.Module) -> bool:
    """Whether a module is a layer that runs a fused block."""
    return STATE in module.__dict__


def injected_state(layer: nn.Module) -> Injected:
    """Return the state of an injected layer."""
    state: Injected = layer.__dict__[STATE]
    return state


def is_untouched(layer: nn.Module) -> bool:
    """Whether an injected layer's modules, code and tensors are still those that were fused."""
    state = injected_state(layer)
    same_code = state.original.forward is state.forward
    return same_code and all_hold(state.links) and is_intact(layer, state.parts)
