"""The engine road of encoder-decoders: the encoder's states become keys and values once per generation.

Shapes: B batch, S queries of a row, T = B * S packed tokens, M states, K kv heads, D head dim, L keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.engine.generation.protocols import Whole
from slipstream.engine.generation.runner import Runner
from slipstream.model.block.block import Block, CrossAttend, Mix, RopeTable
from slipstream.model.block.cross import Relative, add_bias, own_heads, relative_of
from slipstream.model.frame.frame import Frame
from slipstream.model.fused.inject import own_feed
from slipstream.model.fused.state import injected_state
from slipstream.ops.encoder_states import EncoderStates
from slipstream.ops.kv_cache import CachePart, Caches, read_cache, write_cache
from slipstream.ops.step import Step
from slipstream.spec import Role, Rope

__all__ = [
    "TakesEncoderStates",
    "CrossAttendingStack",
    "with_encoder",
    "cross_attends",
    "encoded",
    "may_be_whole",
]


def cross_attends(runner: Runner) -> bool:
    """Whether a runner's layers cross-attend to an encoder's states."""
    return any(block.spec.cross is not None for block in runner.blocks)


@runtime_checkable
class TakesEncoderStates(Protocol):
    """Runs whole steps of a decoder once it has been given the encoder's keys and values.

    Attributes:
        name: As in `Bound`.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    def with_encoder_states(self, encoder_states: EncoderStates) -> Whole | None: ...  # noqa: D102


def may_be_whole(frame: Frame, blocks: Iterable[Block]) -> bool:
    """Whether layers cross-attend and run entirely as blocks, so that whole steps may run them natively."""
    own_feeds = any(injected_state(layer).feeder is not None for layer in frame.layers)
    return not own_feeds and any(block.spec.cross is not None for block in blocks)


def encoded(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return an encoder's states `(B, M, C)` and their mask `(B, M)`, from a decoder's arguments.

    These have an encoder's output, whose own mask takes precedence over that of its input, or states.
    """
    output = inputs.get("encoder_outputs")
    if output is None:
        return inputs["encoder_hidden_states"], inputs.get("encoder_attention_mask")
    own = getattr(output, "attention_mask", None)
    return output.last_hidden_state, inputs.get("attention_mask") if own is None else own


def with_encoder(runner: Runner, states: Tensor, mask: Tensor | None, longest: int) -> Runner:
    """Return a copy of a runner for one generation, which cross-attends to an encoder's states.

    Args:
        runner: A runner for which `cross_attends` is true; not changed.
        states: `(B, M, C)`.
        mask: `(B, M)`, zero where the encoder's input was padding; None for no padding.
        longest: Maximum length of a sequence in this generation.
    """
    seen = None if runner.frame.spec.attends_padding else mask
    batch, length, _ = states.shape
    memory = {}
    for block in runner.blocks:
        made = block.cross_keys_values(states.flatten(0, 1))
        k, v = (t.unflatten(0, (batch, length)).transpose(1, 2).contiguous() for t in made)
        memory[id(block)] = (k, v)
    relatives = {
        id(block): relative_of(layer, injected_state(layer).relative)
        for layer, block in zip(runner.frame.layers, runner.blocks, strict=True)
    }
    feeds = {
        id(block): own_feed(layer) for layer, block in zip(runner.frame.layers, runner.blocks, strict=True)
    }
    copied = copy.copy(runner)
    visible = None if seen is None or bool((seen != 0).all()) else (seen != 0)[:, None, None]
    copied.stack = stack = CrossAttendingStack(memory, visible, relatives, tuple(runner.blocks), feeds)
    cross = stack.encoder_states(longest) if isinstance(runner.whole, TakesEncoderStates) else None
    copied.whole = (
        runner.whole.with_encoder_states(cross)
        if isinstance(runner.whole, TakesEncoderStates) and cross is not None
        else None
    )
    return copied


@dataclass(frozen=True)
class CrossAttendingStack:
    """Runs cross-attending layers over packed tokens; all rows have the same length and no padding.

    Attributes:
        memory: Keys and values of the encoder's states, `(B, K, M, D)` each, by `id` of the block.
        visible: `(B, 1, 1, M)` bool, or None if every state is attended to.
        relatives: By `id` of the block, what computes its bias by relative position, if it has one.
        blocks: The layers in order; if they share a bias, the first one computes it.
        feeds: By `id` of the block, what replaces its feed-forward, on `(B, S, C)`, if anything.
    """

    memory: Mapping[int, tuple[Tensor, Tensor]]
    visible: Tensor | None
    relatives: Mapping[int, Relative | None]
    blocks: tuple[Block, ...]
    feeds: Mapping[int, Mix | None]

    def encoder_states(self, longest: int) -> EncoderStates | None:
        """Return the encoder's part of whole-step calls; None if `EncoderStates` cannot express mask or bias.

        Args:
            longest: Maximum length of a sequence in this generation.
        """
        seen = None
        if self.visible is not None:
            seen = self.visible.sum((1, 2, 3), dtype=torch.int32)
            first = torch.arange(self.visible.shape[-1], device=seen.device) < seen[:, None]
            if not torch.equal(first, self.visible[:, 0, 0]) or bool((seen == 0).any()):
                return None
        if any(one is not None and not one.causal for one in self.relatives.values()):
            return None
        pairs = [self.memory[id(block)] for block in self.blocks]
        tables: dict[int, Tensor] = {}
        relatives = [self._by_distance(block, longest, tables) for block in self.blocks]
        return EncoderStates([k for k, _ in pairs], [v for _, v in pairs], seen, relatives)

    def _by_distance(self, block: Block, longest: int, tables: dict[int, Tensor]) -> Tensor | None:
        """Return a layer's bias on scores, `(H, longest)`, by how many tokens a key is before its query."""
        maker = self.blocks[0] if block.spec.relative == "shared" else block
        relative = self.relatives[id(maker)]
        if relative is None:
            return None
        if id(maker) not in tables:
            like = torch.empty(1, maker.spec.heads, 1, 0, dtype=_dtype_of(maker), device="cpu")
            made = relative.make(like, longest, longest - 1).to(like.dtype)
            tables[id(maker)] = made[0, :, 0].flip(-1).float().contiguous()
        return tables[id(maker)]

    def __call__(
        self,
        blocks: Sequence[Block],
        x: Tensor,
        step: Step,
        caches: Caches,
        tables: dict[Rope, RopeTable],
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run the layers as `run_stack` does, with cross-attention as a third branch in each."""
        shared: Tensor | None = None
        for block, kept in zip(blocks, caches, strict=True):
            relative = self.relatives[id(block)]
            bias = None
            if block.spec.relative == "shared":
                bias = shared = self._bias(self.blocks[0], x, step) if shared is None else shared
            elif relative is not None:
                bias = self._bias(block, x, step)
            bias = None if bias is None else own_heads(bias, block.share)

            def attend(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                block: Block = block,
                pages: tuple[CachePart, CachePart] = kept.pages,
                bias: Tensor | None = bias,
            ) -> Tensor:
                write_cache(k, v, *pages, step.slots)
                if bias is None:
                    return block.ops.paged_attention.run(q, *pages, step, mask=block.mask)  # type: ignore[no-any-return]
                return _attend_with_bias(block, q, pages, step, bias)

            table = None if block.spec.rope is None else tables[block.spec.rope]
            x = block(x, table, attend, self._across(block), feed=self._feed(block))
        return x

    def _across(self, block: Block) -> CrossAttend:
        k, v = self.memory[id(block)]

        def across(q: Tensor) -> Tensor:
            rows = q.unflatten(0, (k.shape[0], -1)).transpose(1, 2)
            how = {"scale": block.spec.scale, "softcap": block.spec.softcap, "sinks": None}
            out: Tensor = block.ops.attention.run(rows, k, v, mask=self.visible, causal=False, **how)
            return out.flatten(0, 1)

        return across

    def _feed(self, block: Block) -> Mix | None:
        """Return what replaces the feed-forward; it gets whole rows: results may depend on prior tokens."""
        feed, rows = self.feeds[id(block)], self.memory[id(block)][0].shape[0]
        return None if feed is None else lambda x: feed(x.unflatten(0, (rows, -1))).flatten(0, 1)

    def _bias(self, block: Block, x: Tensor, step: Step) -> Tensor:
        """Return a step's bias by relative position, causal mask included: `(1, H, S, L)` for all heads."""
        relative = self.relatives[id(block)]
        if relative is None:
            raise AssertionError("a block with a bias by relative position has a part that makes it")
        keys, queries = step.max_kv_len, step.max_query_len
        like = x.new_empty(1, block.spec.heads, queries, 0, dtype=_dtype_of(block))
        made = relative.make(like, keys, keys - queries).to(like.dtype)
        if queries == 1 or not relative.causal:
            return made
        visible = torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril(keys - queries)
        return add_bias(made, visible[None, None])


def _dtype_of(block: Block) -> torch.dtype:
    """Return the dtype of queries, which is that of the QKV matrix."""
    weight = block.weights.matrices[Role.QKV]
    return weight.planes[0].dtype if weight.dtype is None else weight.dtype


def _attend_with_bias(
    block: Block, q: Tensor, caches: tuple[CachePart, CachePart], step: Step, bias: Tensor
) -> Tensor:
    """Attend from rows of equal length to their cache blocks, with a bias on the scores."""
    size, length = caches[0].shape[1], step.max_kv_len
    pages = step.block_table[:, : -(-length // size)].long()
    k, v = (read_cache(c, pages, q.dtype).flatten(1, 2)[:, :length].transpose(1, 2) for c in caches)
    rows = q.unflatten(0, (len(pages), -1)).transpose(1, 2)
    out: Tensor = block.ops.attention.run(
        rows, k, v, mask=bias, causal=False, scale=block.spec.scale, softcap=None, sinks=None
    )
    return out.flatten(0, 1)
