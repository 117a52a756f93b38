"""Numeric descriptions of blocks and frames: all that kernels need, independent of torch.nn and transformers.

A family reads the model's config once and returns one `BlockSpec` per layer, and one `FrameSpec` for what
surrounds the layers (`frames.py`). Layers with equal specs are of one kind: they share kernels and one
self-check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.branches import (
    Gate,
    Growth,
    Latent,
    MoE,
    Multipliers,
    Norm,
    Place,
    QKNorm,
    Recurrence,
    Rope,
    Streams,
)
from slipstream.frames import EncoderSpec, FrameSpec, FrameStreams, LayerInputs
from slipstream.role import SECOND, Role

__all__ = [
    "SECOND",
    "BlockSpec",
    "EncoderSpec",
    "FrameSpec",
    "FrameStreams",
    "Gate",
    "Growth",
    "Latent",
    "LayerInputs",
    "MoE",
    "Multipliers",
    "Norm",
    "Place",
    "QKNorm",
    "Recurrence",
    "Role",
    "Rope",
    "Streams",
    "lender_of",
]


@dataclass(frozen=True)
class BlockSpec:
    """Dimensions and options of one transformer block.

    Attributes:
        hidden: Width of the residual stream (C).
        heads: Query heads (H).
        kv_heads: Key and value heads (K); `heads % kv_heads == 0`.
        head_dim: Width of a head (D).
        ffn: Width of the feed-forward (F); with experts, the width of one expert.
        norm: The block's normalisation.
        place: "pre" normalises the input of a branch (and its output where the post-norm roles are filled);
            "post" normalises the sum, as BERT does.
        parallel: Attention and feed-forward both read the block's input, and both are added to it.
        residual_from: "norm" adds the branch to the normalised input (BLOOM's option), "input" to the input.
        residual_scale: Multiplies each branch before it is added to the residual stream.
        carry: Multiplies the residual stream before a branch is added to it.
        activation: A name in `slipstream.ops.activation`.
        gated: The feed-forward is `activation(gate) * up`.
        sparsity: Share of the gate's values that would be zero if they were normally distributed: what is
            above that quantile of such a distribution goes on, less the quantile; 0 for all values.
        scale: Multiplies the scores.
        softcap: Scores become `softcap * tanh(scores / softcap)`.
        mask: Meaning of the mask that transformers passes. "whole": it fully determines what a token sees.
            "padding": the layer itself adds causality and window to it. "hidden": a bool mask is true where a
            key is not seen.
        scales_mask: An additive mask is multiplied by `scale`, because the original adds it before scaling.
        cache_repeated: Keys and values are repeated to `heads` before transformers' cache stores them.
        causal: A token sees itself and the tokens before it.
        window: Maximum number of tokens that a token sees, itself included (where not causal: window / 2 on
            each side).
        chunk: A token sees none of an earlier chunk of so many positions, counted from the sequence's first.
        alibi: One slope per query head; `slope * alibi_scale * key_position` is added to the scores.
        alibi_scale: See `alibi`; differs from 1 where the original adds the slopes before scaling the scores.
        alibi_in_mask: The part of `alibi_scale` that is already contained in the mask transformers passes.
        sinks: The softmax has one extra term per head, the role `SINKS`.
        rope: The rotary embedding, if any.
        qk_norm: The normalisation of queries and keys, if any.
        clip_qkv: Queries, keys and values are clamped to this magnitude, after `qk_norm` and before `rope`.
        moe: The mixture of experts, if any.
        values: Source of the values: "own" is a separate projection, "keys" the keys before their norm.
        value_norm: Each head's values are normalised by their root mean square, without a weight.
        sharing: "own": keys and values are used by this layer only. "lends": later layers of the same
            attention type reuse them. "borrows": the layer reuses those of such a layer and has no key and
            value projections.
        inputs: Width of a per-layer input, which a third branch adds in; 0 for none.
        streams: The streams of states, if there are several. The layer's own `course` then only names the
            keys and values that it shares; what is computed is data, for every kernel.
        latent: Multi-head latent attention in place of keys and values per head, if any.
        gate: The gate that multiplies the attention output before `ATTN_OUT`, if any.
        growth: How queries are scaled by position, if they are.
        inner_norms: The inputs of `ATTN_OUT` and `MLP_OUT` are normalised.
        mixer: What replaces attention (a key of `Family.mixers`): "a state space", "a convolution", ... It is
            a module that remains part of the layer, runs its own code and keeps its state where it always
            did. None for attention.
        recurrence: What the mixer computes, if `generate` may run it in place of the module.
        beside: The mixer does not replace attention: both read the same input, and their outputs are added.
        multipliers: Constants inside the layer, if it has some.
        feeder: What replaces the feed-forward (a key of `Family.feeders`), likewise a module of the layer: "a
            mixture of experts with limited capacity", ...; None for the block's own feed-forward or experts.
        course: Name of the family's function that orders the layer's branches (a key of `Family.courses`);
            None for the block's own order.
        branches: Which of the two branches, attention and feed-forward, the block has. The norm of an only
            branch is `ATTN_NORM`. "neither" is for courses.
        cross: Width of the encoder states that the layer cross-attends to, between self-attention and
            feed-forward, with as many heads and the same softcap; None without cross-attention.
        relative: A learned relative position bias is added to the scores of the self-attention. With "shared"
            the first layer computes and returns it for the others; with "own" each layer has one.
        twice: The layer has two halves, each with a latent attention and a dense feed-forward, and experts
            beside them. The first half's feed-forward has the roles of the shared experts, and their width;
            the second half has the roles in `SECOND`. Only courses know about halves.
        own_attention: The family's own code decides which keys a query attends to (`Family.attention`).
        wide: The residual stream is float32 in any dtype; the layer's own tensors are not.
        clamp: In float16, sums that are no longer finite are clamped to the dtype's range: after each
            "branch", or at the "end" of the layer.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm: Norm
    place: Literal["pre", "post"] = "pre"
    parallel: bool = False
    residual_from: Literal["input", "norm"] = "input"
    residual_scale: float = 1.0
    carry: float = 1.0
    activation: str = "silu"
    gated: bool = True
    sparsity: float = 0.0
    scale: float = 1.0
    softcap: float | None = None
    mask: Literal["whole", "padding", "hidden"] = "whole"
    scales_mask: bool = False
    cache_repeated: bool = False
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    alibi: tuple[float, ...] | None = None
    alibi_scale: float = 1.0
    alibi_in_mask: float = 0.0
    sinks: bool = False
    rope: Rope | None = None
    qk_norm: QKNorm | None = None
    clip_qkv: float | None = None
    moe: MoE | None = None
    values: Literal["own", "keys"] = "own"
    value_norm: bool = False
    sharing: Literal["own", "lends", "borrows"] = "own"
    inputs: int = 0
    streams: Streams | None = None
    latent: Latent | None = None
    gate: Gate | None = None
    growth: Growth | None = None
    inner_norms: bool = False
    mixer: str | None = None
    recurrence: Recurrence | None = None
    beside: bool = False
    multipliers: Multipliers | None = None
    feeder: str | None = None
    course: str | None = None
    branches: Literal["both", "attention", "feed_forward", "neither"] = "both"
    cross: int | None = None
    relative: Literal["shared", "own"] | None = None
    twice: bool = False
    own_attention: bool = False
    wide: bool = False
    clamp: Literal["branch", "end"] | None = None

    @property
    def q_dim(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def attends(self) -> bool:
        """Whether the block has attention of its own, be it beside a mixer."""
        return (self.mixer is None or self.beside) and self.branches in ("both", "attention")

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """Heads and width of the two tensors that a KV cache keeps for each token, if the layer has one.

        They are keys and values, or a latent and the one rotated key that all heads share. A layer that
        borrows reads those of another one.
        """
        if (self.recurrence is not None and not self.beside) or self.branches == "feed_forward":
            return ()
        if self.latent is None:
            return (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)
        return (1, self.latent.rank), (1, self.latent.rope_dim)

    @property
    def keeps_pages_alone(self) -> bool:
        """Whether generation keeps something of the layer, and nothing but what is `cached`."""
        return bool(self.cached) and self.recurrence is None

    @property
    def half(self) -> BlockSpec:
        """Spec of one half of a layer that has every branch twice."""
        return replace(self, twice=False, moe=None, ffn=0 if self.moe is None else self.moe.shared)

    @property
    def gate_dim(self) -> int:
        """Rows of the gate on the attention output; 0 for none."""
        width = self.head_dim if self.latent is None else self.latent.value_dim
        return 0 if self.gate is None else self.heads * (width if self.gate.per == "channel" else 1)

    @property
    def qkv_rows(self) -> tuple[int, int, int, int]:
        """Rows of queries, keys, values and the gate in the role `QKV`."""
        keys = 0 if self.sharing == "borrows" else self.kv_dim
        return self.q_dim, keys, keys if self.values == "own" else 0, self.gate_dim

    def _attention_shapes(self) -> dict[Role, tuple[int, ...]]:
        latent = self.latent
        if not self.attends:
            return {}
        if latent is None:
            return {Role.QKV: (sum(self.qkv_rows), self.hidden), Role.ATTN_OUT: (self.hidden, self.q_dim)}
        up = self.heads * (latent.plain_dim + latent.value_dim)
        shapes: dict[Role, tuple[int, ...]] = {
            Role.Q_UP: (self.q_dim, latent.query_rank or self.hidden),
            Role.KV_DOWN: (latent.rank + latent.rope_dim, self.hidden),
            Role.KV_UP: (up, latent.rank),
            Role.ATTN_OUT: (self.hidden, self.heads * latent.value_dim),
        }
        if latent.query_rank is not None:
            shapes[Role.Q_DOWN] = (latent.query_rank, self.hidden)
        if self.gate is not None:
            shapes[Role.ATTN_GATE] = (self.gate_dim, self.hidden)
        return shapes

    def matrix_shapes(self) -> Mapping[Role, tuple[int, ...]]:
        """Return the canonical shape of every matrix that a block of this spec must have."""
        gate = 2 if self.gated else 1
        shapes = self._attention_shapes()
        if self.inputs:
            shapes[Role.INPUT_GATE] = (self.inputs, self.hidden)
            shapes[Role.INPUT_OUT] = (self.hidden, self.inputs)
        if (streams := self.streams) is not None:
            shapes[Role.STREAM_ROUTER] = (streams.count, self.hidden)
            shapes[Role.STREAM_PREDICT] = (streams.count**2, streams.count)
            shapes[Role.STREAM_CORRECT] = (streams.count, streams.count)
            shapes[Role.NARROW_IN] = (streams.rank, self.hidden)
            shapes[Role.NARROW_OUT] = (self.hidden, streams.rank)
        if self.cross is not None:
            shapes[Role.CROSS_Q] = (self.q_dim, self.hidden)
            shapes[Role.CROSS_KV] = (2 * self.kv_dim, self.cross)
            shapes[Role.CROSS_OUT] = (self.hidden, self.q_dim)
        if self.feeder is not None or self.branches not in ("both", "feed_forward"):
            return shapes
        if self.moe is None:
            shapes |= {Role.MLP_IN: (gate * self.ffn, self.hidden), Role.MLP_OUT: (self.hidden, self.ffn)}
            return shapes
        experts, scored = self.moe.experts, self.moe.experts + self.moe.idle
        shapes |= {
            Role.ROUTER: (scored, self.hidden),
            Role.EXPERTS_IN: (scored, gate * self.ffn, self.hidden),
            Role.EXPERTS_OUT: (experts, self.hidden, self.ffn),
        }
        if self.twice:
            shapes |= {SECOND[role]: shape for role, shape in self.half.matrix_shapes().items()}
        if self.moe.shared:
            shapes[Role.SHARED_IN] = (gate * self.moe.shared, self.hidden)
            shapes[Role.SHARED_OUT] = (self.hidden, self.moe.shared)
            if self.moe.shared_gate or self.moe.residual:
                shapes[Role.SHARED_GATE] = (2 if self.moe.residual else 1, self.hidden)
        return shapes


def lender_of(specs: Sequence[BlockSpec], index: int) -> int:
    """Return the index of the layer whose keys and values layer `index` uses: its own unless it borrows.

    Raises:
        ValueError: No layer before it lends keys and values of its attention type.
    """
    spec = specs[index]
    if spec.sharing != "borrows":
        return index
    for before in range(index - 1, -1, -1):
        if specs[before].sharing == "lends" and _kind(specs[before]) == _kind(spec):
            return before
    raise ValueError(f"layer {index} borrows keys and values of type {_kind(spec)!r}, which no layer lends")


def _kind(spec: BlockSpec) -> str | None:
    return None if spec.rope is None else spec.rope.layer_type
