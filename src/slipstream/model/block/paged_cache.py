"""The paged KV cache of one generation: blocks of tokens, allocated to sequences and released together.

Shapes: P blocks, Z tokens per block, K kv heads, D head dim, S numbers of a state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence

import torch

from slipstream.errors import DeviceError
from slipstream.ops.kv_cache import CachePart, Int8Cache, LayerCache, tensors_of
from slipstream.spec import BlockSpec, lender_of

__all__ = ["BLOCK_SIZE", "PagedCache", "bytes_per_token", "slots_of"]

BLOCK_SIZE = 32
"""Tokens per block (Z)."""


class PagedCache:
    """Keys and values of every layer, `(P, Z, K, D)` each, with the list of free blocks.

    One generation owns one cache, so generations in other threads cannot interfere, and its memory is freed
    when the generation ends.

    Attributes:
        layers: What each layer keeps. Keys and values are contiguous, and `Int8Cache`s if the dtype is int8.
            With latent attention (`BlockSpec.cached`), a latent and one key, side by side in memory unless
            the dtype is int8. Of a layer that borrows, the lending layer's.
        capacity: Number of blocks.
    """

    def __init__(
        self,
        specs: Sequence[BlockSpec],
        blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rows: int = 1,
    ) -> None:
        """Reserve memory in each layer; on the CPU the system commits it as it is written.

        Args:
            specs: The layers.
            blocks: Number of blocks.
            dtype: Of keys and values.
            device: Where the cache is.
            rows: Number of sequences, each of which has a state in the layers with a recurrence.

        Raises:
            DeviceError: The device has too little memory.
        """
        shapes = [shape for spec in specs for shape in _shapes(spec, dtype)]
        try:
            # Parts of one shape share one tensor, so that a block is copied in all layers at once.
            rooms = {
                shape: _room(shapes.count(shape), (blocks, BLOCK_SIZE, *shape), dtype, device)
                for shape in dict.fromkeys(shapes)
            }
            self._states = [
                torch.empty(rows, spec.recurrence.state, dtype=torch.float32, device=device)
                for spec in specs
                if spec.recurrence is not None
            ]
        except RuntimeError as error:
            size = blocks * BLOCK_SIZE * bytes_per_token(specs, dtype) / 2**30
            raise DeviceError(
                f"no memory on {device} for a KV cache of {blocks * BLOCK_SIZE} tokens ({size:.2f} GiB): "
                f"{error}; ask for fewer new tokens, or fewer sequences at once"
            ) from error
        parts = {shape: _parts(room) for shape, room in rooms.items()}
        states = iter(self._states)
        self.layers = [
            LayerCache(
                *_pair(spec, [next(parts[shape]) for shape in _shapes(spec, dtype)]),
                None if spec.recurrence is None else next(states),
            )
            for spec in specs
        ]
        for index in range(len(specs)):
            self.layers[index] = self.layers[lender_of(specs, index)]
        self._rooms = [tensor for room in rooms.values() for tensor in tensors_of(room)]
        self.capacity = blocks
        self._free = list(range(blocks - 1, -1, -1))

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks, given as `(source, target)` pairs, in every layer and in this order."""
        for source, target in pairs:
            for room in self._rooms:
                room[:, target].copy_(room[:, source])

    def follow(self, sources: Sequence[int]) -> None:
        """Continue sequence i from the state of sequence `sources[i]`, in every layer with a recurrence."""
        if not self._states:
            return
        rows = torch.tensor(sources, device=self._states[0].device)
        for states in self._states:
            states[: len(sources)] = states[rows]

    def lend(self, blocks: int) -> PagedCache:
        """Return a separate cache over the first `blocks` blocks of the same memory, all of them free."""
        lent = copy.copy(self)
        lent.capacity, lent._free = blocks, list(range(blocks - 1, -1, -1))
        return lent

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks and return their indices.

        Raises:
            DeviceError: Fewer blocks are free.
        """
        if count > len(self._free):
            raise DeviceError(
                f"the KV cache has {len(self._free)} of {self.capacity} blocks free; {count} are needed"
            )
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        """Return blocks to the free list."""
        self._free.extend(reversed(blocks))

    @property
    def nbytes(self) -> int:
        """Bytes reserved in all layers."""
        return sum(tensor.nbytes for tensor in (*self._rooms, *self._states))


def slots_of(blocks: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """Return the cache slots of the first tokens of a sequence, `(tokens,)` int64.

    Args:
        blocks: The sequence's blocks, in order.
        tokens: Number of tokens.
        device: Device of the result.
    """
    place = torch.arange(tokens, device=device)
    indices = torch.tensor(blocks, dtype=torch.int64, device=device)
    return indices[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE


def bytes_per_token(specs: Sequence[BlockSpec], dtype: torch.dtype) -> int:
    """Return the bytes that one token takes in a cache of these layers."""
    scales = 4 if dtype == torch.int8 else 0
    parts = (part for spec in specs if spec.sharing != "borrows" for part in spec.cached)
    return sum(heads * (dtype.itemsize * width + scales) for heads, width in parts)


def _shapes(spec: BlockSpec, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Return heads and width of each tensor of a layer, which has one if both of its parts are adjacent."""
    if not spec.cached or spec.sharing == "borrows":
        return ()
    (heads, first), (_, second) = spec.cached
    return spec.cached if spec.latent is None or dtype == torch.int8 else ((heads, first + second),)


def _pair(spec: BlockSpec, tensors: Sequence[CachePart]) -> tuple[CachePart, CachePart]:
    """Return both parts of a layer from its tensors of `_shapes`."""
    if len(tensors) == 2:
        return tensors[0], tensors[1]
    if not tensors:
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        return nothing, nothing
    whole = tensors[0]
    if isinstance(whole, Int8Cache):
        raise AssertionError("codes have one scale per part, so the parts are not adjacent")
    first, second = whole.split([width for _, width in spec.cached], dim=-1)
    return first, second


def _room(parts: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> CachePart:
    """Allocate the keys or values of several layers, `(parts, P, Z, K, D)`."""
    values = torch.empty((parts, *shape), dtype=dtype, device=device)
    if dtype != torch.int8:
        return values
    return Int8Cache(values, torch.empty((parts, *shape[:-1]), device=device, dtype=torch.float32))


def _parts(room: CachePart) -> Iterator[CachePart]:
    """Iterate over the parts of a tensor from `_room`."""
    if isinstance(room, Int8Cache):
        return iter([Int8Cache(*pair) for pair in zip(room.codes, room.scales, strict=True)])
    return iter(room)
