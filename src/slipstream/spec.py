"""A transformer block in numbers: everything a kernel has to know, and nothing of torch.nn or transformers.

A family reads the model's config once and returns one `BlockSpec` per layer (and one `FrameSpec` for what
stands around the layers). Layers with equal specs are of one kind: they share kernels and one self-check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.branches import Gate, Growth, Latent, MoE, Norm, QKNorm, Rope
from slipstream.role import SECOND, Role

__all__ = [
    "SECOND",
    "BlockSpec",
    "EncoderSpec",
    "FrameSpec",
    "Gate",
    "Growth",
    "Latent",
    "MoE",
    "Norm",
    "QKNorm",
    "Role",
    "Rope",
]


@dataclass(frozen=True)
class BlockSpec:
    """One transformer block in numbers.

    Attributes:
        hidden: Width of the residual stream (C).
        heads: Query heads (H).
        kv_heads: Key and value heads (K); `heads % kv_heads == 0`.
        head_dim: Width of a head (D).
        ffn: Width of the feed-forward (F), of one expert where there are experts.
        norm: The block's normalisation.
        place: "pre" normalises what enters a branch (and, where the post-norm roles are filled, what leaves
            it); "post" normalises the sum, as BERT does.
        parallel: Attention and feed-forward both read the block's input and are added together.
        residual_from: "norm" adds the branch to the normalised input (BLOOM's option), "input" to the input.
        residual_scale: Multiplies each branch before it is added.
        carry: Multiplies what a branch is added to.
        activation: A name in `slipstream.ops.activation`.
        gated: The feed-forward is `activation(gate) * up`.
        scale: Multiplies the scores.
        softcap: Scores become `softcap * tanh(scores / softcap)`.
        mask: What the mask that transformers passes says. "whole": just what a token sees. "padding": the
            layer itself adds causality and window to it. "hidden": a bool mask is true where a key is not
            seen.
        scales_mask: What a mask adds is multiplied by `scale` as the scores are: the original adds it before.
        cache_repeated: Keys and values are repeated to `heads` before transformers' cache keeps them.
        causal: A token sees itself and what came before.
        window: A token sees at most this many tokens, itself among them (on each side where not causal:
            window / 2).
        alibi: One slope per query head; `slope * alibi_scale * key_position` is added to the scores.
        alibi_scale: See `alibi`; not 1 where the original adds the slopes before it scales the scores.
        alibi_in_mask: As much of `alibi_scale` as the mask that transformers passes holds already.
        sinks: The softmax has one more term per head, the role `SINKS`.
        rope: The rotary embedding, if any.
        qk_norm: The normalisation of queries and keys, if any.
        clip_qkv: Queries, keys and values are clamped to this magnitude, after `qk_norm` and before `rope`.
        moe: The mixture of experts, if any.
        values: Where values come from: a projection of their own, or keys before their norm.
        value_norm: Each head's values are normalised by their root mean square, without a weight.
        sharing: Keys and values are the layer's "own"; or what it "lends" to later layers of its window; or
            what it "borrows" from such a one, having no projections for them.
        inputs: Width of an input of the layer's own, which a third branch weighs in; 0 for none.
        latent: Multi-head latent attention in place of keys and values per head, if any.
        gate: What multiplies the attention's answer before `ATTN_OUT`, if anything.
        growth: How queries grow with their position, if they do.
        inner_norms: What enters `ATTN_OUT` and `MLP_OUT` is normalised.
        mixer: What stands in attention's place and stays a part of the layer, which runs its own code and
            keeps its state where it always did: "a state space", "a convolution", ...; None for attention.
        feeder: What stands in the feed-forward's place and stays a part of the layer: "experts of limited
            capacity", ...; None for the feed-forward or the experts of the block.
        course: Which of its family's courses says how the layer's branches follow each other
            (`Family.courses`); None for the block's own.
        branches: What the block has of the two.
        cross: Width of an encoder's states that the layer attends to, between its own attention and its
            feed-forward, with as many heads and the same cap; None where it attends to itself alone.
        relative: A learned bias by relative position is added to the scores of the layer's own attention.
            "shared" is made by the first layer, returned, and handed to the others; "own" is each layer's.
        twice: The layer has two halves with a latent attention and a dense feed-forward each, and its
            experts beside them. The first half's feed-forward has the roles of the shared experts, and their
            width; the second's roles are those of `SECOND`. Only courses know of halves.
        own_attention: The family's own code says which keys a query meets (`Family.attention`).
        clamp: In float16, sums that are no longer finite are brought back into the dtype's range: after each
            "branch", or at the layer's "end".
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
    scale: float = 1.0
    softcap: float | None = None
    mask: Literal["whole", "padding", "hidden"] = "whole"
    scales_mask: bool = False
    cache_repeated: bool = False
    causal: bool = True
    window: int | None = None
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
    latent: Latent | None = None
    gate: Gate | None = None
    growth: Growth | None = None
    inner_norms: bool = False
    mixer: str | None = None
    feeder: str | None = None
    course: str | None = None
    branches: Literal["both", "attention", "feed_forward", "neither"] = "both"
    cross: int | None = None
    relative: Literal["shared", "own"] | None = None
    twice: bool = False
    own_attention: bool = False
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
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of the two things that a cache keeps of each token.

        They are keys and values, or a latent and the one rotated key that all heads share.
        """
        if self.latent is None:
            return (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)
        return (1, self.latent.rank), (1, self.latent.rope_dim)

    @property
    def half(self) -> BlockSpec:
        """One of the halves of a layer that has every branch twice."""
        return replace(self, twice=False, moe=None, ffn=0 if self.moe is None else self.moe.shared)

    @property
    def gate_dim(self) -> int:
        """Rows of the gate behind the attention; 0 for none."""
        width = self.head_dim if self.latent is None else self.latent.value_dim
        return 0 if self.gate is None else self.heads * (width if self.gate.per == "channel" else 1)

    @property
    def qkv_rows(self) -> tuple[int, int, int, int]:
        """Rows of queries, keys, values and the gate in the role `QKV`."""
        keys = 0 if self.sharing == "borrows" else self.kv_dim
        return self.q_dim, keys, keys if self.values == "own" else 0, self.gate_dim

    def _attention_shapes(self) -> dict[Role, tuple[int, ...]]:
        latent = self.latent
        if self.mixer is not None or self.branches not in ("both", "attention"):
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
        """Canonical shape of every matrix that a block of this spec must have."""
        gate = 2 if self.gated else 1
        shapes = self._attention_shapes()
        if self.inputs:
            shapes[Role.INPUT_GATE] = (self.inputs, self.hidden)
            shapes[Role.INPUT_OUT] = (self.hidden, self.inputs)
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


@dataclass(frozen=True)
class FrameSpec:
    """What stands around the layers of a causal language model, by the model's own names.

    Names are paths from the model that was handed in (`LlamaForCausalLM`); an absent part is None. The packed
    batch goes `embed * embed_scale + pos_embed[position + pos_offset]`, `project_in`, `embed_norm`, the
    layers, `final_norm`, `project_out`, `head * logit_scale + logit_bias`, `logit_softcap`.

    Attributes:
        layers: The module list of the layers.
        embed: The token embedding.
        head: The vocabulary projection.
        norm: Kind of `final_norm` and `embed_norm`.
        final_norm: The norm after the last layer.
        embed_norm: The norm before the first layer.
        pos_embed: The learned (or tabulated) position embedding: a module, or a buffer.
        pos_offset: Added to a position before it is looked up.
        pos_padding: Tokens of this id look up the row of that index, wherever they stand (M2M100's).
        pos_after_norm: Positions are added after `embed_norm`, not before it.
        hears_padding: The decoder sees all of an encoder's states, whatever a mask says (Whisper's).
        project_in: Linear from the embedding's width to the hidden one.
        project_out: Linear from the hidden width to the head's.
        rotary: The rotary module.
        embed_scale: Multiplies the token embedding; rounded to the embedding's dtype where
            `embed_scale_rounded`.
        embed_scale_rounded: Whether the original rounds the multiplier to the embedding's dtype first.
        logit_scale: Multiplies the logits.
        logit_bias: A buffer `(1, V)` that is added to the logits.
        logit_softcap: Logits become `softcap * tanh(logits / softcap)`.
        restart: The original drops its cache and computes anew once a generation passes this length (Phi-3's
            long rope).
    """

    layers: str
    embed: str
    head: str
    norm: Norm
    final_norm: str | None = None
    embed_norm: str | None = None
    pos_embed: str | None = None
    pos_offset: int = 0
    pos_padding: int | None = None
    pos_after_norm: bool = False
    hears_padding: bool = False
    project_in: str | None = None
    project_out: str | None = None
    rotary: str | None = None
    embed_scale: float = 1.0
    embed_scale_rounded: bool = False
    logit_scale: float = 1.0
    logit_bias: str | None = None
    logit_softcap: float | None = None
    restart: int | None = None

    @property
    def root(self) -> str:
        """Path of what runs the layers."""
        return self.layers.rpartition(".")[0]


@dataclass(frozen=True)
class EncoderSpec:
    """What stands around an encoder's layers, by names from the model that has them (`BertModel`).

    Tokens go `words[id] + types[type] + positions[place]`, `norm`, `project_in`, the layers; a pooler
    multiplies the first of each row, and takes the hyperbolic tangent.

    Attributes:
        layers: The module list of the layers.
        words: The token embedding.
        positions: The embedding by place.
        norm: The layer norm before the first layer.
        types: The embedding by token type, 0 where none is given; None where there is none.
        padding: Places count tokens that are not of this id, from the number after it, and padding is at the
            place of its id; None where they are counted from 0 whatever the tokens are.
        project_in: Linear from the embedding's width to the hidden one, or None.
        pooler: Has a linear `dense`; what the model lacks is left out.
    """

    layers: str
    words: str
    positions: str
    norm: str
    types: str | None = None
    padding: int | None = None
    project_in: str | None = None
    pooler: str = "pooler"
