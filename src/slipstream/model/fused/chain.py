"""Chains of deferred layers, their arguments, and the one call that runs them.

Shapes: B batch, S sequence, C hidden, K kv heads, D head dim, T packed tokens, R rotated dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.errors import DeviceError
from slipstream.model.block.block import Block, RopeTable
from slipstream.model.block.layer_call import LayerCall
from slipstream.model.block.run import run_block
from slipstream.model.fused.dynamic_cache import Kept
from slipstream.model.fused.padding import Rows, pack, real_tokens, sees_all
from slipstream.ops.rope import half_tables
from slipstream.ops.step import Older, Packed
from slipstream.ops.text import TextFrame, TextRows
from slipstream.spec import BlockSpec, Rope

__all__ = ["Chain", "Encoder", "TextRun", "by_distance"]


class Encoder(Protocol):
    """Runs several layers in one call: `kernels.cpu.stack.NativeStack`."""

    name: str
    most_tokens: int

    @property
    def blocks(self) -> Sequence[Any]: ...  # noqa: D102
    def has(self, block: Any) -> bool: ...  # noqa: D102
    def kind(self, block: Any) -> int | None: ...  # noqa: D102

    def encode(  # noqa: D102
        self,
        blocks: Sequence[Any],
        x: Tensor,
        packed: Packed,
        tables: dict[Rope, RopeTable],
        relative: Tensor | None,
    ) -> Tensor | None: ...

    def extend(  # noqa: D102
        self,
        blocks: Sequence[Any],
        x: Tensor,
        packed: Packed,
        tables: dict[Rope, RopeTable],
        older: Sequence[Older],
        past: int | None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]] | None: ...
    def expect(self) -> None: ...  # noqa: D102
    def text(self, frame: TextFrame) -> TextRun | None: ...  # noqa: D102


TextRun = Callable[[Sequence[Any], TextRows, Sequence[object]], "tuple[Tensor, Tensor | None] | None"]
"""The signature of `kernels.cpu.text.NativeText`."""


@dataclass
class Chain:
    """A chain of deferred layers and the input of the first of them.

    Attributes:
        encoder: Runs the layers.
        drops: As in the `Scope`.
        x: Input of the first layer, `(B, S, C)`.
        real: Mask of the real (not padding) tokens, `(B, S)`; None where all are.
        kept: The cache that the layers extend, if any; every token is real then.
        steps: Each layer's block, and the mask and angles that the model passed to it.
        masks: Results of `read`, by the mask's id and the kind of layer; with each mask itself, so that its
            id is not reused.
        tables: The model's cosines and sines by rope, `(B | 1, S, R)`.
        versions: Tensors that the model passed, with versions; they must not change before the layers run.
        blank: NaN in the shape of the states.
        arguments: The other arguments of the layer that joined last (`same_arguments.py`).
        bias: Added to the scores of every layer, `(1 | B, H, S, S)`, as the model passed it; or None.
        relative: That bias by distance, from `by_distance`.
    """

    encoder: Encoder
    drops: bool
    x: Tensor
    real: Tensor | None
    kept: Kept | None = None
    steps: list[tuple[Block, Tensor | None, tuple[Tensor, Tensor] | None]] = field(default_factory=list)
    masks: dict[tuple[Any, ...], tuple[Tensor | None, Tensor | None | bool]] = field(default_factory=dict)
    tables: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    blank: Tensor | None = None
    arguments: Any = None
    bias: Tensor | None = None
    relative: Tensor | None = None

    def accept(self, block: Block, call: LayerCall, index: int) -> bool:
        """Append a layer with its index in the cache; return False if it cannot run with the others."""
        spec = block.spec
        if not self.encoder.has(block) or self.steps and spec.causal != self.steps[0][0].spec.causal:
            return False
        if call.bias is not self.bias:
            return False
        if spec.rope is not None and not self._turns(spec.rope, call.rope):
            return False
        if not _same(self.read(block, call.mask), self.real):
            return False
        if self.kept is None:
            if call.cache is not None:
                return False
        elif call.cache is not self.kept.cache or not self.kept.accept(spec, index):
            return False
        self.steps.append((block, call.mask, call.rope))
        return True

    def again(self, block: Block, index: int) -> bool:
        """Append a layer with the same arguments as the previous one, except its index in the cache."""
        if self.kept is not None and not self.kept.accept(block.spec, index):
            return False
        self.steps.append((block, *self.steps[-1][1:]))
        return True

    def read(self, block: Block, mask: Tensor | None) -> Tensor | None | bool:
        """Return the result of `real_tokens`, or of `sees_all` with a cache, for a layer's mask."""
        spec = block.spec
        key = (id(mask), spec.causal, spec.window, spec.chunk, spec.mask, spec.alibi is None)
        if key not in self.masks:
            if mask is not None:
                self.watch(mask)
            batch, length = self.x.shape[:2]
            kept = self.kept
            if kept is not None and (kept.past or kept.room is not None):
                sees = sees_all(mask, spec, length, length + kept.past, kept.room)
                real: Tensor | None | bool = None if sees else False
            else:
                biased = self.bias is not None
                real = real_tokens(mask, spec, batch, length, drops=self.drops, biased=biased)
            self.masks[key] = mask, real
        return self.masks[key][1]

    def _turns(self, rope: Rope, pair: tuple[Tensor, Tensor] | None) -> bool:
        """Whether a layer is passed the same angles as the other layers with the same rope."""
        if pair is None:
            return False
        known = self.tables.get(rope)
        if known is not None:
            return all(_is_view(a, b) for a, b in zip(known, pair, strict=True))
        batch, length = self.x.shape[:2]
        shapes = {(rows, length, t.shape[-1]) for t in pair for rows in (1, batch) if t.dim() == 3}
        if pair[0].shape != pair[1].shape or tuple(pair[0].shape) not in shapes:
            return False
        self.tables[rope] = pair
        for table in pair:
            self.watch(table)
        return True

    def watch(self, tensor: Tensor) -> None:
        """Record a tensor's version, to detect writes to it; inference tensors have no version."""
        if not tensor.is_inference():
            self.versions.append((tensor, tensor._version))

    def run(self, count: int) -> Tensor:
        """Run the first `count` layers, add their keys and values to the cache, and return `(B, S, C)`.

        Raises:
            DeviceError: A tensor that the model passed to them was written to since.
        """
        if any(tensor._version != version for tensor, version in self.versions):
            raise DeviceError(
                "the model wrote in place to arguments of its layers before the deferred layers ran; build "
                "the engine with replace_with_kernel_inject=False for this model"
            )
        steps = self.steps[:count]
        batch, length, width = self.x.shape
        specs = (step[0].spec for step in steps)
        biased = self.bias is not None
        rows = pack(self.real, batch, length, specs=specs, drops=self.drops, biased=biased)
        x = self.x.reshape(batch * length, width)
        entering = x if rows.index is None else x[rows.index]
        packed, tables = _turned(rows, self.tables, batch, length)
        states = self._call([step[0] for step in steps], entering, packed, tables)
        if states is None:
            return self._one_by_one(steps)
        if rows.index is not None:
            states = torch.zeros_like(x).index_copy_(0, rows.index, states)
        return states.view(batch, length, width)

    def _call(
        self, blocks: Sequence[Block], x: Tensor, packed: Packed, tables: dict[Rope, RopeTable]
    ) -> Tensor | None:
        if self.kept is None:
            return self.encoder.encode(blocks, x, packed, tables, self.relative)
        past = self.kept.past if self.kept.in_place else None
        result = self.encoder.extend(blocks, x, packed, tables, self.kept.older[: len(blocks)], past)
        if result is None:
            return None
        self.kept.commit(result[1])
        return result[0]

    def _one_by_one(self, steps: Sequence[tuple[Block, Any, Any]]) -> Tensor:
        x, kept = self.x, self.kept
        if kept is not None and kept.done:
            raise DeviceError(
                "the model was moved or cast during a call, after some of its layers had extended the cache"
            )
        for place, (block, mask, rope) in enumerate(steps):
            cache, index = (None, 0) if kept is None else (kept.cache, kept.places[place])
            x = run_block(block, LayerCall(x, mask, self.bias, cache, rope, None), index, None)[0]
        if kept is not None:
            kept.done = len(steps)
        return x

    def end(self) -> None:
        """Make sure that every layer has extended the cache, even if no state was read."""
        if self.kept is not None and self.kept.done < len(self.steps):
            self.run(len(self.steps))


def _turned(
    rows: Rows, tables: dict[Rope, tuple[Tensor, Tensor]], batch: int, length: int
) -> tuple[Packed, dict[Rope, RopeTable]]:
    """Flatten the tables to rows with every angle once, and point the packed tokens to their rows."""
    shared = all(cos.shape[0] == 1 for cos, _ in tables.values())
    angles: dict[Rope, RopeTable] = {}
    for rope, pair in tables.items():
        cos, sin = (t if shared else t.expand(batch, -1, -1) for t in pair)
        cos, sin = half_tables(cos, sin, rope)
        angles[rope] = (cos.flatten(0, 1), sin.flatten(0, 1))
    if not tables or not shared:
        return rows.packed, angles
    return replace(rows.packed, positions=rows.packed.positions % length), angles


def by_distance(bias: Tensor, spec: BlockSpec, length: int) -> Tensor | None:
    """Return a bias of attention scores by the distance between query and key.

    Args:
        bias: `(1 | B, H, S, S)`.
        spec: Spec of a layer to which it is passed.
        length: S.

    Returns:
        `(H, 2 * S - 1)` float32: column S - 1 + d is for keys d tokens before the query. None if the bias
        depends on anything else, or the layer is causal or has biases of its own.
    """
    own = spec.causal or spec.alibi is not None or spec.scales_mask or spec.latent is not None
    if own or bias.shape[1:] != (spec.heads, length, length) or not bias.is_floating_point():
        return None
    one = bias[0]
    same = bias.stride(0) == 0 or torch.equal(bias[1:], bias[:1].expand(bias.shape[0] - 1, -1, -1, -1))
    if not same or not torch.equal(one[:, 1:, 1:], one[:, :-1, :-1]):
        return None
    return torch.cat((one[:, 0].flip(-1), one[:, 1:, 0]), dim=-1).float()


def _is_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory with the same layout."""
    places = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other))
    return one is other or next(places) == next(places)


def _same(one: Tensor | None | bool, other: Tensor | None) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return one is other
