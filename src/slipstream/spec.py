"""A transformer block in numbers: everything a kernel has to know, and nothing of torch.nn or transformers.

A family reads the model's config once and returns one `BlockSpec` per layer (and one `FrameSpec` for what
stands around the layers). Layers with equal specs are of one kind: they share kernels and one self-check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

__all__ = ["BlockSpec", "FrameSpec", "Latent", "MoE", "Norm", "QKNorm", "Role", "Rope"]


class Role(StrEnum):
    """What a tensor is for; decides its canonical layout, how it is sharded, and whether it may be quantized.

    Matrices are stored `(out, in)`; the rows of `QKV` are `[q | k | v]`, those of `CROSS_KV` `[k | v]` and
    those of a gated `MLP_IN` `[gate | up]`. Expert matrices carry the expert first: `(experts, out, in)`.
    `ATTN_SCALE` and `MLP_SCALE` multiply a branch, one number per channel, before it is added.
    `ROUTER_BIAS` is added to experts' scores for the choice among them, and to nothing else.
    """

    ATTN_NORM = "attn_norm"
    QKV = "qkv"
    Q_DOWN = "q_down"
    Q_DOWN_NORM = "q_down_norm"
    Q_UP = "q_up"
    KV_DOWN = "kv_down"
    KV_DOWN_NORM = "kv_down_norm"
    KV_UP = "kv_up"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    SINKS = "sinks"
    ATTN_OUT = "attn_out"
    ATTN_POST_NORM = "attn_post_norm"
    ATTN_SCALE = "attn_scale"
    CROSS_NORM = "cross_norm"
    CROSS_Q = "cross_q"
    CROSS_KV = "cross_kv"
    CROSS_OUT = "cross_out"
    MLP_NORM = "mlp_norm"
    MLP_IN = "mlp_in"
    MLP_OUT = "mlp_out"
    MLP_POST_NORM = "mlp_post_norm"
    MLP_SCALE = "mlp_scale"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    EXPERTS_IN = "experts_in"
    EXPERTS_OUT = "experts_out"
    SHARED_IN = "shared_in"
    SHARED_OUT = "shared_out"
    SHARED_GATE = "shared_gate"

    @property
    def is_matrix(self) -> bool:
        """Whether rows are multiplied by the role; the others are norms and small vectors."""
        return self.is_quantizable or self in (Role.ROUTER, Role.SHARED_GATE, Role.KV_UP)

    @property
    def is_cross(self) -> bool:
        """Whether the role belongs to attention over an encoder's states."""
        return self in (Role.CROSS_NORM, Role.CROSS_Q, Role.CROSS_KV, Role.CROSS_OUT)

    @property
    def is_quantizable(self) -> bool:
        """Whether the role may be stored in a weight format; a router decides too much for its size."""
        return self in _QUANTIZABLE


_QUANTIZABLE = frozenset(
    {
        Role.QKV,
        Role.Q_DOWN,
        Role.Q_UP,
        Role.KV_DOWN,
        Role.ATTN_OUT,
        Role.CROSS_Q,
        Role.CROSS_KV,
        Role.CROSS_OUT,
        Role.MLP_IN,
        Role.MLP_OUT,
        Role.EXPERTS_IN,
        Role.EXPERTS_OUT,
        Role.SHARED_IN,
        Role.SHARED_OUT,
    }
)


@dataclass(frozen=True)
class Norm:
    """A normalisation over the hidden dimension.

    Attributes:
        kind: "rms" divides by the root mean square; "layer" also subtracts the mean.
        eps: Added to the mean square (or variance) before the root.
        offset: Added to the weight before it multiplies (1.0 where checkpoints store `weight - 1`).
    """

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class QKNorm:
    """A normalisation of queries and keys.

    Attributes:
        norm: Its kind, eps and offset.
        over: "head" normalises each head by itself; the weight is `(D,)`, or `(H, D)` where heads have their
            own. "all" normalises the whole projection, `(H * D,)`.
        after_rope: It follows the rotary embedding, rather than comes before it.
    """

    norm: Norm
    over: Literal["head", "all"] = "head"
    after_rope: bool = False


@dataclass(frozen=True)
class Rope:
    """Which part of a head is rotated, and how the model's table of cosines is laid out.

    The angles are never computed here: they come from the model's own rotary module (or table), so every
    scaling rule that transformers has is right by construction.

    Attributes:
        dim: Leading dims of each head that are rotated; the others pass unchanged.
        interleaved: Pairs are `(0, 1), (2, 3), ...` when true, `(0, dim/2), (1, dim/2 + 1), ...` when false.
        table: How `cos` and `sin` repeat each angle: "halves" is `[a b ... a b ...]`, "pairs" is
            `[a a b b ...]`, "half" has each angle once.
        layer_type: Passed to the rotary module where it keeps a table per type of layer.
        source: "module" asks the model's rotary module; "buffer" reads the attention's own `[sin | cos]`
            table.
    """

    dim: int
    interleaved: bool = False
    table: Literal["halves", "pairs", "half"] = "halves"
    layer_type: str | None = None
    source: Literal["module", "buffer"] = "module"


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): what is cached is one short vector per token.

    A head's dims are `plain_dim` unrotated ones, then `rope_dim` rotated ones, whose keys all heads share.

    Attributes:
        rank: Width of the latent that keys and values are projections of.
        query_rank: Width of the one that queries are; None where they are projected at once.
        plain_dim: See above.
        rope_dim: See above.
        value_dim: Width of a head's values.
        norm: Of both latents.
        interleaved: The rotated dims come as pairs, and leave as halves.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int
    norm: Norm
    interleaved: bool = False


@dataclass(frozen=True)
class MoE:
    """A mixture of experts in place of the plain feed-forward.

    Attributes:
        experts: Number of experts.
        top_k: Experts that see each token.
        scoring: "softmax_topk" takes the softmax over all experts, then the best; "topk_softmax" takes the
            best logits, then their softmax; "sparsemixer" is PhiMoE's two-step choice (arXiv 2310.00811,
            inference); "sigmoid" scores each expert by itself, then takes the best.
        normalize: Divide the chosen weights by their sum ("softmax_topk" and "sigmoid").
        least_sum: What that sum is at least taken for.
        groups: Experts stand in this many groups of equal size; only those of `top_groups` of them are chosen
            from ("softmax_topk" and "sigmoid").
        top_groups: See `groups`.
        group_score: What a group is chosen by: its best expert, or the sum of its best two.
        factor: Multiplies the chosen weights, after all else.
        exact: The router's logits are computed in float32.
        jitter: Threshold of "sparsemixer".
        shared: Width of the experts that see every token; 0 for none.
        shared_gate: What the shared experts say is multiplied by the sigmoid of the role `SHARED_GATE`.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax_topk", "topk_softmax", "sparsemixer", "sigmoid"] = "softmax_topk"
    normalize: bool = False
    least_sum: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    factor: float = 1.0
    exact: bool = False
    jitter: float = 0.0
    shared: int = 0
    shared_gate: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether experts are chosen among all by their logits, in the dtype of what enters, and no more."""
        whole = self.top_groups >= self.groups and self.factor == 1.0 and not self.least_sum
        return self.scoring != "sigmoid" and whole and not self.exact


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
        activation: A name in `slipstream.ops.activation`.
        gated: The feed-forward is `activation(gate) * up`.
        scale: Multiplies the scores.
        softcap: Scores become `softcap * tanh(scores / softcap)`.
        mask: What the mask that transformers passes says. "whole": just what a token sees. "padding": the
            layer itself adds causality and window to it. "hidden": a bool mask is true where a key is not
            seen.
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
        latent: Multi-head latent attention in place of keys and values per head, if any.
        cross: Width of an encoder's states that the layer attends to, between its own attention and its
            feed-forward, with as many heads; None where it attends to itself alone.
        relative: A learned bias by relative position is added to the scores of the layer's own attention.
            "shared" is made by the first layer, returned, and handed to the others; "own" is each layer's.
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
    activation: str = "silu"
    gated: bool = True
    scale: float = 1.0
    softcap: float | None = None
    mask: Literal["whole", "padding", "hidden"] = "whole"
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
    latent: Latent | None = None
    cross: int | None = None
    relative: Literal["shared", "own"] | None = None
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

    def _attention_shapes(self) -> dict[Role, tuple[int, ...]]:
        latent = self.latent
        if latent is None:
            rows = self.q_dim + 2 * self.kv_dim
            return {Role.QKV: (rows, self.hidden), Role.ATTN_OUT: (self.hidden, self.q_dim)}
        up = self.heads * (latent.plain_dim + latent.value_dim)
        shapes: dict[Role, tuple[int, ...]] = {
            Role.Q_UP: (self.q_dim, latent.query_rank or self.hidden),
            Role.KV_DOWN: (latent.rank + latent.rope_dim, self.hidden),
            Role.KV_UP: (up, latent.rank),
            Role.ATTN_OUT: (self.hidden, self.heads * latent.value_dim),
        }
        if latent.query_rank is not None:
            shapes[Role.Q_DOWN] = (latent.query_rank, self.hidden)
        return shapes

    def matrix_shapes(self) -> Mapping[Role, tuple[int, ...]]:
        """Canonical shape of every matrix that a block of this spec must have."""
        gate = 2 if self.gated else 1
        shapes = self._attention_shapes()
        if self.cross is not None:
            shapes[Role.CROSS_Q] = (self.q_dim, self.hidden)
            shapes[Role.CROSS_KV] = (2 * self.kv_dim, self.cross)
            shapes[Role.CROSS_OUT] = (self.hidden, self.q_dim)
        if self.moe is None:
            shapes |= {Role.MLP_IN: (gate * self.ffn, self.hidden), Role.MLP_OUT: (self.hidden, self.ffn)}
            return shapes
        experts = self.moe.experts
        shapes |= {
            Role.ROUTER: (experts, self.hidden),
            Role.EXPERTS_IN: (experts, gate * self.ffn, self.hidden),
            Role.EXPERTS_OUT: (experts, self.hidden, self.ffn),
        }
        if self.moe.shared:
            shapes[Role.SHARED_IN] = (gate * self.moe.shared, self.hidden)
            shapes[Role.SHARED_OUT] = (self.hidden, self.moe.shared)
            if self.moe.shared_gate:
                shapes[Role.SHARED_GATE] = (1, self.hidden)
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
