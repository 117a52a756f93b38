"""Whole native steps of decoders with cross-attention, whose keys and values are made once per generation.

Shapes: B batch, M encoder states, K kv heads, H heads, D head dim, L positions that a generation may reach.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.angles import KeptAngles
from slipstream.kernels.cpu.block_parts import across_of
from slipstream.kernels.cpu.blocks import Prepared, refuse_block
from slipstream.kernels.cpu.frames import FrameLike
from slipstream.kernels.cpu.library import ISAS, load, refuse
from slipstream.kernels.cpu.model import NativeModel
from slipstream.kernels.cpu.stack import NativeStack, Run
from slipstream.kernels.requirements import BlockLike
from slipstream.ops.encoder_states import EncoderStates
from slipstream.ops.kv_cache import Caches

__all__ = ["NativeEncoderDecoder", "bind_encoder_decoder"]


def bind_encoder_decoder(
    frame: FrameLike, blocks: Sequence[BlockLike], otherwise: Run
) -> NativeEncoderDecoder | None:
    """Return the runner of whole steps of a decoder with cross-attention; None if its parts run one by one.

    Args:
        frame: The embedding, positions, final norm and head around the layers.
        blocks: The layers in order.
        otherwise: The fallback, as in `bind_stack`.
    """
    isa = next((isa for isa in ISAS if refuse(isa) is None), None)
    library = None if isa is None else load(isa)
    if library is None or not blocks or any(refuse_block(block, cross_attends=True) for block in blocks):
        return None
    return NativeEncoderDecoder(frame, _Stack(blocks, library, otherwise))


@dataclass(frozen=True)
class NativeEncoderDecoder:
    """Starts generations whose steps are native calls, given an encoder's keys and values.

    Attributes:
        frame: The embedding, positions, final norm and head around the layers.
        stack: The layers.
        angles: Rotary tables that the generations share.
    """

    frame: FrameLike
    stack: _Stack
    angles: KeptAngles = field(default_factory=KeptAngles, compare=False)

    @property
    def name(self) -> str:
        """The implementation's name in the report."""
        return self.stack.name

    def begin(self, caches: Caches, longest: int) -> None:
        """Return None: a generation can only begin on the result of `with_encoder_states`."""

    def with_encoder_states(self, states: EncoderStates) -> NativeModel | None:
        """Return the runner of one generation's steps over encoder states; None if the library has none."""
        if states.keys[0].dtype not in DTYPES or states.keys[0].device.type != "cpu":
            return None
        return NativeModel(self.frame, self.stack.with_encoder_states(states), angles=self.angles)


class _Stack(NativeStack):
    """Layers with cross-attention; they can run only once they have an encoder's keys and values."""

    _states: EncoderStates | None = None
    _base: Prepared | None = None
    _with_states: Prepared | None = None

    @staticmethod
    def refuses(block: BlockLike) -> str | None:
        """Return why the library cannot run a block that is given encoder states, or None if it can."""
        return refuse_block(block, cross_attends=True)

    def with_encoder_states(self, states: EncoderStates) -> _Stack:
        """Return a stack of the same layers with an encoder's keys and values, which its copies lose."""
        stack = type(self).__new__(type(self))  # a copy would prepare the structs of all blocks again
        stack.__dict__.update(self.__dict__)
        stack._states, stack._with_states = states, None
        return stack

    def ready(self, *, recurring: bool = True) -> Prepared | None:
        """Return the structs like the base class, with pointers to the encoder's keys and values."""
        base = super().ready(recurring=recurring)
        if base is None or self._states is None:
            return base
        if self._with_states is None or self._base is not base:
            self._base, self._with_states = base, _with_states(base, self.blocks, self._states)
        return self._with_states


def _with_states(base: Prepared, blocks: Sequence[BlockLike], states: EncoderStates) -> Prepared:
    """Return copies of the blocks' structs that point to the encoder's keys and values."""
    memory: list[Any] = []
    structs = type(base.blocks).from_buffer_copy(base.blocks)
    pairs = zip(structs, blocks, states.keys, states.values, states.relatives, strict=True)
    for struct, block, keys, values, relative in pairs:
        across = across_of(block, memory)
        across.k, across.v, across.seen = keys.data_ptr(), values.data_ptr(), address(states.seen)
        across.states, across.dtype = keys.shape[2], DTYPES[keys.dtype]
        memory.append(across)
        struct.across = ctypes.pointer(across)
        struct.causal = 1  # over pages; in a forward, some layers leave that to the mask they are given
        if relative is not None:
            struct.mask.relative, struct.mask.reach = relative.data_ptr(), relative.shape[1]
    held = [t for t in (*states.keys, *states.values, *states.relatives, states.seen) if t is not None]
    return replace(
        base,
        blocks=structs,
        tensors=(*base.tensors, *held),
        addresses=(*base.addresses, *map(Tensor.data_ptr, held)),
        memory=(*base.memory, memory, base.blocks, states),
    )
