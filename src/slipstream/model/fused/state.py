"""What a fused layer carries, and whether it is still what it was when it was fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.families import OwnAttention, OwnBias, OwnCourse, OwnMixer
from slipstream.model.block.block import Block
from slipstream.model.fused.layer_changes import Parts, is_intact
from slipstream.model.fused.links import Link, all_hold
from slipstream.spec import Role
from slipstream.weights.recipe import Plan

__all__ = ["STATE", "Injected", "injected_state", "is_injected", "is_untouched"]

STATE = "_slipstream"
"""The attribute of a layer that runs a fused block."""


@dataclass
class Injected:
    """What an injected layer carries beside its original parts.

    Attributes:
        original: The class that the layer had.
        block: The fused layer.
        plans: How the layer's own tensors make up the block's; its rank's part where there are several.
        whole: The same for all ranks together.
        index: The layer's place in the cache.
        returns: Turns what `run_block` returns into what the original class returns.
        rope_table: Path of the layer's own `[sin | cos]` table, if the model passes none.
        rotary: Path of the layer's own rotary module, if the model passes no angles.
        bool_masks: The model makes boolean masks; where it does not, only its own code knows what one means.
        forward: The original class's code.
        relative: Path of the part that makes biases by relative position, if there is one.
        parts: The modules inside of the layer when it was injected.
        links: The layer's parameters as the block holds them.
        bias: Makes what the layer itself adds to the scores, of the layer and its call's arguments by name.
        attention: The layer's own, where its spec says so.
        mixer: What stands in attention's place, if anything.
        feeder: What stands in the feed-forward's place, if anything.
        course: How its branches follow each other, where its spec says so.
        unread: Names of arguments that nobody reads.
        declined: How many calls the original code served.
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
    declined: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether its arguments, and nothing of the layer's own, are all that its block is told."""
        own = (self.rope_table, self.relative, self.rotary, self.bias, self.mixer, self.feeder, self.course)
        return own == (None,) * len(own)

    @property
    def reads(self) -> frozenset[str]:
        """Names of arguments that at most a part of the layer reads."""
        own = (self.bias, self.attention, self.mixer, self.feeder, self.course)
        return self.unread.union(*(one.reads for one in own if one is not None))


def is_injected(module: nn.Module) -> bool:
    """Whether a module is a layer that runs a fused block."""
    return STATE in module.__dict__


def injected_state(layer: nn.Module) -> Injected:
    """The state of an injected layer."""
    state: Injected = layer.__dict__[STATE]
    return state


def is_untouched(layer: nn.Module) -> bool:
    """Whether an injected layer's parts, their code and their tensors are still those that were fused."""
    state = injected_state(layer)
    same_code = state.original.forward is state.forward
    return same_code and all_hold(state.links) and is_intact(layer, state.parts)
