"""Whole native steps of decoders with cross-attention, whose keys and values are made once per generation.

Shapes: B batch, M encoder states, K kv heads, H heads, D head dim, L positions that a generation may reach.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.angles import KeptAngles
from slipstream.kernels.cpu.blocks import Prepared, across_of, refuse_block
from slipstream.kernels.cpu.library import ISAS, load, refuse
from slipstream.kernels.cpu.model import FrameLike, NativeModel
from slipstream.kernels.cpu.stack import Caches, NativeStack, Run
from slipstream.kernels.requirements import BlockLike
from slipstream.ops.encoder_states import Heard

__all__ = ["NativeListener", "bind_listener"]


def bind_listener(frame: FrameLike, blocks: Sequence[BlockLike], otherwise: Run) -> NativeListener | None:
    """Return the runner of whole steps of a decoder with cross-attention; None if its parts run one by one.

    Args:
        frame: The embedding, positions, final norm and head around the layers.
        blocks: The layers in order.
        otherwise: The fallback, as in `bind_stack`.
    """
    isa = next((isa for isa in ISAS if refuse(isa) is None), None)
    library = None if isa is None else load(isa)
    if library is None or not blocks or any(refuse_block(block, hears=True) for block in blocks):
        return None
    return NativeListener(frame, _Stack(blocks, library, otherwise))


@dataclass(frozen=True)
class NativeListener:
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
        """Return None: a generation can only begin on the result of `hear`."""

    def hear(self, heard: Heard) -> NativeModel | None:
        """Return the runner of one generation's steps over encoder states; None if the library has none."""
        if heard.keys[0].dtype not in DTYPES or heard.keys[0].device.type != "cpu":
            return None
        return NativeModel(self.frame, self.stack.hear(heard), angles=self.angles)


class _Stack(NativeStack):
    """Layers with cross-attention; they can run only once they have an encoder's keys and values."""

    _heard: Heard | None = None
    _base: Prepared | None = None
    _told: Prepared | None = None

    @staticmethod
    def refuses(block: BlockLike) -> str | None:
        """Return why the library cannot run a block that is given encoder states, or None if it can."""
        return refuse_block(block, hears=True)

    def hear(self, heard: Heard) -> _Stack:
        """Return a stack of the same layers with an encoder's keys and values, which its copies lose."""
        stack = copy.copy(self)
        stack._heard, stack._told = heard, None
        return stack

    def ready(self) -> Prepared | None:
        """Return the structs like the base class, with pointers to the encoder's keys and values."""
        base = super().ready()
        if base is None or self._heard is None:
            return base
        if self._told is None or self._base is not base:
            self._base, self._told = base, _told(base, self.blocks, self._heard)
        return self._told


def _told(base: Prepared, blocks: Sequence[BlockLike], heard: Heard) -> Prepared:
    """Return copies of the blocks' structs that point to the encoder's keys and values."""
    memory: list[Any] = []
    structs = type(base.blocks).from_buffer_copy(base.blocks)
    pairs = zip(structs, blocks, heard.keys, heard.values, heard.relatives, strict=True)
    for struct, block, keys, values, relative in pairs:
        across = across_of(block, memory)
        across.k, across.v, across.seen = keys.data_ptr(), values.data_ptr(), address(heard.seen)
        across.states, across.dtype = keys.shape[2], DTYPES[keys.dtype]
        memory.append(across)
        struct.across = ctypes.pointer(across)
        if relative is not None:
            struct.mask.relative, struct.mask.reach = relative.data_ptr(), relative.shape[1]
    held = [t for t in (*heard.keys, *heard.values, *heard.relatives, heard.seen) if t is not None]
    return replace(
        base,
        blocks=structs,
        tensors=(*base.tensors, *held),
        addresses=(*base.addresses, *map(Tensor.data_ptr, held)),
        memory=(*base.memory, memory, base.blocks, heard),
    )
