"""Numeric descriptions of a block's parts: norms, rotary embeddings, gates, latents, recurrences, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Gate",
    "Growth",
    "Latent",
    "MoE",
    "Multipliers",
    "Norm",
    "Place",
    "QKNorm",
    "Recurrence",
    "Rope",
    "Streams",
]


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
        over: "head" normalises each head separately; the weight is `(D,)`, or `(H, D)` where each head has
            its own. "all" normalises the whole projection, `(H * D,)`.
        after_rope: It is applied after the rotary embedding rather than before.
    """

    norm: Norm
    over: Literal["head", "all"] = "head"
    after_rope: bool = False


@dataclass(frozen=True)
class Rope:
    """Which part of a head is rotated, and how the model's table of cosines is laid out.

    The angles are never computed here: they come from the model's own rotary module (or table), so every
    scaling rule of transformers is right by construction.

    Attributes:
        dim: Number of leading dims of each head that are rotated; the others pass unchanged.
        interleaved: Pairs are `(0, 1), (2, 3), ...` when true, `(0, dim/2), (1, dim/2 + 1), ...` when false.
        table: How `cos` and `sin` repeat each angle: "halves" is `[a b ... a b ...]`, "pairs" is
            `[a a b b ...]`, "half" has each angle once.
        layer_type: Passed to the rotary module where it keeps one table per type of layer; or names the
            layer's own rotary module (`FrameSpec.rotaries`).
        source: "module" calls the model's rotary module; "buffer" reads the attention's own `[sin | cos]`
            table.
        backwards: Pairs are rotated by the negative of their angles.
    """

    dim: int
    interleaved: bool = False
    table: Literal["halves", "pairs", "half"] = "halves"
    layer_type: str | None = None
    source: Literal["module", "buffer"] = "module"
    backwards: bool = False


@dataclass(frozen=True)
class Growth:
    """Scaling of queries by position: `1 + slope * ln(1 + floor((position + offset) / period))`.

    Source: Llama 4's `attn_scale` and `floor_scale`; Nakanishi 2025 (arXiv 2501.19399) for the idea.

    Attributes:
        slope: See above.
        period: See above.
        offset: See above.
        padded: Positions are indices into the cache, in which padding counts.
    """

    slope: float
    period: float
    offset: int = 0
    padded: bool = False


@dataclass(frozen=True)
class Gate:
    """A gate that multiplies the attention output and is computed from the attention input.

    Attributes:
        activation: Activation of the gate, "sigmoid" or "softplus", computed in float32.
        per: One gate for each "channel" of a head, or one for each "head".
    """

    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    per: Literal["channel", "head"] = "channel"


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): the cache holds one short vector per token.

    A head has `plain_dim` unrotated dims followed by `rope_dim` rotated ones, whose keys all heads share.

    Attributes:
        rank: Width of the latent from which keys and values are projected.
        query_rank: Width of the latent from which queries are projected; None where they have no latent.
        plain_dim: See above.
        rope_dim: See above.
        value_dim: Width of a head's values.
        norm: Normalisation of both latents.
        query_scale: Multiplies queries.
        latent_scale: Multiplies the normalised latent of keys and values.
        interleaved: The rotated dims are projected as adjacent pairs, and reordered into halves.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int
    norm: Norm
    interleaved: bool = False
    query_scale: float = 1.0
    latent_scale: float = 1.0


@dataclass(frozen=True)
class Streams:
    """Several streams of states per token, of which one runs through a layer ("alternating updates").

    With streams x_0, x_1, ... and the active one a, and m(y) = tanh(router(norm(y) / C))::

        p_q = x_q + sum over i of predict(m(x_a))[q * count + i] * x_i
        y   = the layer's branches on p_a; a third one beside attention adds n + norm(out(in(n))),
              n = attn_norm(p_a), and the sum of these three is divided by sqrt(2)
        x_q = p_q + (correct(m(y))[q] + 1) * (y - p_a)

    The branch of the layer's own input reads x_a (times `STREAM_SCALE` where `scaled`), and is added to all
    streams but the first. Source: Baykal et al. 2023 (arXiv 2301.13310), as transformers computes Gemma 3n.

    Attributes:
        count: Number of streams (S).
        active: The one that runs through the layer (a).
        rank: Width of the narrow branch, between `NARROW_IN` and `NARROW_OUT` (R).
        scaled: See above.
    """

    count: int
    active: int
    rank: int
    scaled: bool


@dataclass(frozen=True)
class Place:
    """Where one input of a recurrence is in a token's projected row: head h's begins at start + h * step.

    Attributes:
        start: See above.
        step: See above.
        channel: The convolution's channel of the first head's first number; those of the heads are adjacent.
        scale: Multiplies the input.
    """

    start: int
    step: int = 0
    channel: int = 0
    scale: float = 1.0


@dataclass(frozen=True)
class Recurrence:
    """A mixer whose state per sequence has a fixed size, as `ops.recurrence` computes it.

    A causal depthwise convolution is alone, or precedes a gated delta rule or a state space. It is projected
    from the block's input, by one matrix or several whose outputs follow one another.

    Attributes:
        rule: "none": `gate * conv(q * v)`, each with one number per channel. "delta": the gated delta rule
            (arXiv 2412.06464). "space": a state space with one decay per head (arXiv 2405.21060). In these
            two, q, k and v are convolved, with silu. "selective": a state space with a decay for each number
            of its state (arXiv 2312.00752). Only v is convolved; two more matrices make keys, queries and
            the inputs of the steps of it, and steps of the latter. There is one head; q, k, rate and decay
            are not read.
        width: Number of tokens that the convolution covers, the current one included.
        channels: Channels of the convolution.
        q: Queries, `key_dim` per key head (a state space's C). Places are by key head.
        k: Keys, likewise (a state space's B).
        v: Values, `value_dim` for each of a key head's value heads.
        gate: Likewise; its silu multiplies the output.
        rate: One number per value head, the delta rule's beta before its sigmoid.
        decay: One number per value head, before the softplus.
        key_heads: Heads of queries and keys; 0 without a rule.
        value_heads: Heads of values and of the state, a multiple of `key_heads`.
        key_dim: Width of queries and keys.
        value_dim: Width of values; a head's state is `(key_dim, value_dim)`.
        norm: Normalisation of the output before the gate multiplies it, or after where `gate_first`.
        norm_width: Number of adjacent channels that are normalised together.
        gate_first: See `norm`.
        rate_scale: Multiplies the delta rule's rate, the sigmoid of `rate`.
        least_step: Lower bound of a state space's step, the softplus of its decay, but for single tokens that
            continue a sequence: transformers bounds the steps of prompts only.
        rank: Width of the inputs of a selective state space's steps; 0 for others.
        inner_norm: Normalisation of these inputs, of the keys and of the queries, each.
    """

    rule: Literal["none", "delta", "space", "selective"]
    width: int
    channels: int
    q: Place
    v: Place
    gate: Place
    k: Place = Place(0)
    rate: Place = Place(0)
    decay: Place = Place(0)
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    norm: Norm | None = None
    norm_width: int = 0
    gate_first: bool = False
    rate_scale: float = 1.0
    least_step: float = 0.0
    rank: int = 0
    inner_norm: Norm | None = None

    @property
    def outputs(self) -> int:
        """Width of the mixer's output before its last projection."""
        single = self.rule in ("none", "selective")
        return self.channels if single else self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """Numbers of a sequence's state: the convolution's last inputs, then the heads' states."""
        return (self.width - 1) * self.channels + self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class MoE:
    """A mixture of experts in place of the plain feed-forward.

    Attributes:
        experts: Number of experts.
        top_k: Number of experts per token.
        scoring: "softmax_topk" takes the softmax over all experts, then the top k; "topk_softmax" takes the
            top k logits, then their softmax; "sparsemixer" is PhiMoE's two-step choice (arXiv 2310.00811,
            inference); "sigmoid" takes the sigmoid of every logit, then the top k; "topk_sigmoid" takes the
            top k logits, then their sigmoid.
        normalize: Divide the chosen weights by their sum ("softmax_topk" and "sigmoid").
        least_sum: Lower bound of that sum.
        more_sum: Added to that sum.
        groups: Number of groups of equal size that the experts form; experts are chosen only from the best
            `top_groups` groups ("softmax_topk" and "sigmoid").
        top_groups: See `groups`.
        group_score: How groups are ranked: by their best expert, or by the sum of their best two.
        factor: Multiplies the chosen weights, last of all.
        exact: The router's logits are computed in float32.
        jitter: Threshold of "sparsemixer".
        shared: Width of the shared experts, which process every token; 0 for none.
        shared_gate: The output of the shared experts is multiplied by the sigmoid of the role `SHARED_GATE`.
        residual: The softmax of that role's two outputs weighs experts and shared experts (arXiv 2201.05596).
        weighs_input: Weights multiply an expert's input rather than its output.
        beside: Shared and routed experts are two branches, each with norms of its own, whose sum is the
            feed-forward's output. Router and routed experts read the residual stream, each through its norm.
        router_scale: Multiplies the normalised input of the router, where `beside`.
        idle: Number of identity experts, numbered after the others, which return their input. The router
            scores them, and `EXPERTS_IN` has rows for them that nothing reads. Only courses know about them.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax_topk", "topk_softmax", "sparsemixer", "sigmoid", "topk_sigmoid"] = (
        "softmax_topk"
    )
    normalize: bool = False
    least_sum: float = 0.0
    more_sum: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    factor: float = 1.0
    exact: bool = False
    jitter: float = 0.0
    shared: int = 0
    shared_gate: bool = False
    residual: bool = False
    weighs_input: bool = False
    beside: bool = False
    router_scale: float = 1.0
    idle: int = 0


@dataclass(frozen=True)
class Multipliers:
    """Constants inside a layer, by what they multiply (Falcon-H1's, arXiv 2507.22448).

    Attributes:
        attention_in: The normalised input, before it is projected to queries, keys and values.
        keys: The projected keys.
        attention_out: The output of the attention branch.
        mixer_out: The output of the mixer.
        gate: The gate of the feed-forward, before its activation.
        feed_out: The output of the feed-forward.
    """

    attention_in: float = 1.0
    keys: float = 1.0
    attention_out: float = 1.0
    mixer_out: float = 1.0
    gate: float = 1.0
    feed_out: float = 1.0
