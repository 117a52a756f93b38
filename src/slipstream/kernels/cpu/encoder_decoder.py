"""Whole steps of decoders that listen to an encoder: its states are keys and values once per generation.

Shapes: B batch, M states, K kv heads, H heads, D head dim, L positions that a generation may reach.
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
    """What runs whole steps of a decoder that listens, or None where its parts run one by one.

    Args:
        frame: What stands around the layers.
        blocks: The layers in order.
        otherwise: As of `bind_stack`.
    """
    isa = next((isa for isa in ISAS if refuse(isa) is None), None)
    library = None if isa is None else load(isa)
    if library is None or not blocks or any(refuse_block(block, hears=True) for block in blocks):
        return None
    return NativeListener(frame, _Stack(blocks, library, otherwise))


@dataclass(frozen=True)
class NativeListener:
    """Begins generations whose steps are native calls, once it is told what an encoder said.

    Attributes:
        frame: What stands around the layers.
        stack: The layers.
        angles: What the generations share.
    """

    frame: FrameLike
    stack: _Stack
    angles: KeptAngles = field(default_factory=KeptAngles, compare=False)

    @property
    def name(self) -> str:
        """As of `Bound`."""
        return self.stack.name

    def begin(self, caches: Caches, longest: int) -> None:
        """Nothing: no encoder has said anything."""

    def hear(self, heard: Heard) -> NativeModel | None:
        """What runs the steps of one generation; None where the library does not."""
        if heard.keys[0].dtype not in DTYPES or heard.keys[0].device.type != "cpu":
            return None
        return NativeModel(self.frame, self.stack.hear(heard), angles=self.angles)


class _Stack(NativeStack):
    """Layers that listen; without what they hear, they are only described."""

    _heard: Heard | None = None
    _base: Prepared | None = None
    _told: Prepared | None = None

    @staticmethod
    def refuses(block: BlockLike) -> str | None:
        """As `refuse_block` says of a block that is told what it hears."""
        return refuse_block(block, hears=True)

    def hear(self, heard: Heard) -> _Stack:
        """The same layers, which are told what an encoder said; copies of them have heard nothing."""
        told = copy.copy(self)
        told._heard, told._told = heard, None
        return told

    def ready(self) -> Prepared | None:
        """As the base class has it, with what is heard."""
        base = super().ready()
        if base is None or self._heard is None:
            return base
        if self._told is None or self._base is not base:
            self._base, self._told = base, _told(base, self.blocks, self._heard)
        return self._told


def _told(base: Prepared, blocks: Sequence[BlockLike], heard: Heard) -> Prepared:
    """Structs of some blocks that point to what they hear."""
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
