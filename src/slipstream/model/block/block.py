"""The block: one implementation of every family's layer, written against roles.

Shapes: T packed tokens, C hidden, H heads, K kv heads, D head dim, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.model.block.experts import run_experts
from slipstream.model.block.gate import Turning, growing, in_range, multiplied, opened
from slipstream.model.block.latent_attention import queries_and_latents
from slipstream.ops import Ops
from slipstream.ops.activation import sparse, xielu
from slipstream.ops.linear import Weight, times, times_apart
from slipstream.ops.moe import Routed
from slipstream.ops.recurrence import RecurrentLike
from slipstream.ops.step import AttentionMask
from slipstream.parallel.collectives import all_sum, norm_across
from slipstream.parallel.shard import Share
from slipstream.spec import BlockSpec, Latent, Multipliers, Norm, Role
from slipstream.weights.load import BlockWeights

__all__ = ["Attend", "Block", "CrossAttend", "Mix", "RopeTable"]

RopeTable = tuple[Tensor, Tensor]
"""Cosines and sines of the packed tokens, `(T, R / 2)` each, with every angle once."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention as the caller provides it: q `(T, H, D)`, k and v `(T, K, D)` to `(T, H, D)`; owns the cache."""

Mix = Callable[[Tensor], Tensor]
"""A module of the layer that replaces a branch: normalised `(T, C)` to `(T, C)`; it owns its state."""

CrossAttend = Callable[[Tensor], Tensor]
"""Cross-attention as the caller provides it: q `(T, H, D)` to `(T, H, D)`; it owns keys and values."""


_POST_NORMS = frozenset({Role.ATTN_POST_NORM, Role.MLP_POST_NORM})


class Block:
    """One transformer layer over packed tokens, bound to its kernels.

    The residual stream, where `place` is "pre" and the branches are sequential::

        x ─┬─ attn_norm ─ qkv ─ q/k norm ─ rope ─ attend ─ attn_out ─ attn_post_norm ─ * scale ─(+)─┐
           └─────────────────────────────────────────────────────────────────────────────────────┘
          ─┬─ mlp_norm ─ mlp_in ─ activation ─ mlp_out  (or experts) ─ mlp_post_norm ─ * scale ─(+)─▶
           └─────────────────────────────────────────────────────────────────────────────────────┘

    A block with cross-attention has a third branch between the two, which attends to an encoder's states::

        ─┬─ cross_norm ─ cross_q ─ attend across ─ cross_out ─ cross_post_norm ─(+)─▶
         └───────────────────────────────────────────────────────────────────────┘

    Where `parallel`, both branches read the same `x` (the second through `attn_norm` if there is no
    `mlp_norm`) and are added to it together. Where `place` is "post", `attn_norm`, `cross_norm` and
    `mlp_norm` normalise the sums instead. A norm whose role is absent passes its input on. A branch's scale
    is `residual_scale`, times one number per channel where `attn_scale` and `mlp_scale` are there.

    Attributes:
        spec: The block in numbers.
        weights: Its tensors by role.
        ops: The implementations it was bound to.
        mask: What the paged attention needs besides lengths.
        share: This rank's part of a layer that is split over several ranks: `spec` and `weights` are the
            rank's, and the output of a branch is summed over the ranks before anything else happens to it.
        part: The mixer over packed tokens, where the spec has a `recurrence` and its module is as expected.
    """

    def __init__(self, spec: BlockSpec, weights: BlockWeights, ops: Ops, share: Share | None = None) -> None:
        """Take the weights as they are; nothing is copied."""
        self.spec, self.weights, self.ops, self.share = spec, weights, ops, share
        self._by = spec.multipliers or Multipliers()
        self.part: RecurrentLike | None = None
        sinks = weights.vectors.get(Role.SINKS)
        device = weights.device
        self.mask = AttentionMask(
            scale=spec.scale,
            window=spec.window,
            chunk=spec.chunk,
            softcap=spec.softcap,
            alibi=None
            if spec.alibi is None
            else torch.tensor(spec.alibi, device=device, dtype=torch.float32) * spec.alibi_scale,
            sinks=None if sinks is None else sinks.weight,
        )

    @property
    def whole(self) -> BlockSpec:
        """Spec of the whole layer, of which this block may be one rank's part."""
        return self.spec if self.share is None else self.share.whole

    def __call__(
        self,
        x: Tensor,
        rope: RopeTable | None,
        attend: Attend,
        across: CrossAttend | None = None,
        *,
        mix: Mix | None = None,
        feed: Mix | None = None,
        positions: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            x: `(T, C)`; not changed.
            rope: The table for these tokens; ignored where the spec has no rope.
            attend: The caller's attention for this layer.
            across: The caller's attention over an encoder's states; None skips that branch.
            mix: Replaces attention, or runs beside it, where the spec has a mixer.
            feed: Replaces the feed-forward, where the spec has a feeder.
            positions: `(T,)` int64; needed where the spec has `growth`.
            inputs: `(T, P)`, the per-layer input, where the spec has one.

        Returns:
            `(T, C)`, a new tensor in the dtype of `x`.
        """
        if positions is not None and self.spec.growth is not None:
            attend = growing(attend, self.spec.growth, positions)
        if self.weights.lease is None:
            return self._run(x, rope, attend, across, (mix, feed), inputs)
        with self.weights.lease:
            return self._run(x, rope, attend, across, (mix, feed), inputs)

    def follow(self, course: Callable[[], Any]) -> Any:
        """Run a family's own course while every tensor of the block has its values."""
        with self.weights.held():
            return course()

    def _run(
        self,
        x: Tensor,
        rope: RopeTable | None,
        attend: Attend,
        across: CrossAttend | None,
        own: tuple[Mix | None, Mix | None],
        inputs: Tensor | None,
    ) -> Tensor:
        spec, (mix, feed) = self.spec, own
        if spec.place == "post":
            attended = self.sum(self.attention(x, rope, attend)) if mix is None else mix(x)
            x = self.norm(Role.ATTN_NORM, x + self._scaled(Role.ATTN_SCALE, attended))
            x = self._ask(x, across)
            fed = self._scaled(Role.MLP_SCALE, self.sum(self.feed_forward(x)))
            return self._end(self.norm(Role.MLP_NORM, x + fed))
        normed = self.norm(Role.ATTN_NORM, x)
        residual = self._carried(normed if spec.residual_from == "norm" else x)
        if spec.branches == "feed_forward":
            return self._feed(residual, normed, feed, inputs)
        attended = self._attended(normed, rope, attend, mix)
        if spec.parallel:
            entry = self.norm(Role.MLP_NORM, x) if Role.MLP_NORM in self.weights.vectors else normed
            return residual + self._both(attended, self.feed_forward(entry))
        # Mixers and feeders are not split: every rank runs the whole module.
        attended = self.norm(Role.ATTN_POST_NORM, self.sum(attended) if mix is None else attended)
        x = self._ask(self._branch(residual + self._scaled(Role.ATTN_SCALE, attended)), across)
        if spec.branches == "attention":
            return self._end(x)
        normed = self.norm(Role.MLP_NORM, x)
        residual = self._carried(normed if spec.residual_from == "norm" else x)
        return self._feed(residual, normed, feed, inputs)

    def _attended(self, x: Tensor, rope: RopeTable | None, attend: Attend, mix: Mix | None) -> Tensor:
        """Run attention, or the mixer in its place, or both: the rank's part of `(T, C)`, to `(T, C)`."""
        if mix is not None and not self.spec.beside:
            return mix(x)
        entry = multiplied(x, self._by.attention_in)
        attended = multiplied(self.attention(entry, rope, attend), self._by.attention_out)
        return attended if mix is None else multiplied(mix(x), self._by.mixer_out) + attended

    def _feed(self, residual: Tensor, normed: Tensor, feed: Mix | None, inputs: Tensor | None) -> Tensor:
        """Run the feed-forward branch and what follows it."""
        fed = self.sum(self.feed_forward(normed, residual)) if feed is None else feed(normed)
        scaled = self._scaled(Role.MLP_SCALE, self.norm(Role.MLP_POST_NORM, fed))
        return self._end(self._weigh_in(residual + scaled, inputs))

    def _weigh_in(self, x: Tensor, inputs: Tensor | None) -> Tensor:
        """Add the branch of the per-layer input, which is whole on every rank; then scale the result."""
        if inputs is not None:
            gate = self.ops.activation.run(
                self.linear(Role.INPUT_GATE, x), name=self.spec.activation, gated=False
            )
            x = x + self.norm(Role.INPUT_NORM, self.linear(Role.INPUT_OUT, gate * inputs))
        scale = self.weights.vectors.get(Role.LAYER_SCALE)
        return x if scale is None or scale.weight is None else x * scale.weight

    def _carried(self, residual: Tensor) -> Tensor:
        return multiplied(residual.float() if self.spec.wide else residual, self.spec.carry)

    def sum(self, branch: Tensor) -> Tensor:
        """Sum a branch's partial outputs over the ranks."""
        return branch if self.share is None else all_sum(branch, self.share.tp)

    def _both(self, attended: Tensor, fed: Tensor) -> Tensor:
        """Return the scaled sum of two branches; without post-norms, one all-reduce serves both."""
        if self.share is None or not _POST_NORMS.isdisjoint(self.weights.vectors):
            attended = self.norm(Role.ATTN_POST_NORM, self.sum(attended))
            fed = self.norm(Role.MLP_POST_NORM, self.sum(fed))
            return self._scaled(Role.ATTN_SCALE, attended) + self._scaled(Role.MLP_SCALE, fed)
        # Scaling is linear, so each rank can scale its part before the sum.
        return self.sum(self._scaled(Role.ATTN_SCALE, attended) + self._scaled(Role.MLP_SCALE, fed))

    def _ask(self, x: Tensor, across: CrossAttend | None) -> Tensor:
        """Apply the cross-attention branch, if there is one."""
        if across is None:
            return x
        pre = self.spec.place == "pre"
        entry = self.norm(Role.CROSS_NORM, x) if pre else x
        q = self.linear(Role.CROSS_Q, entry).unflatten(-1, (-1, self.spec.head_dim))
        x = x + self.norm(Role.CROSS_POST_NORM, self.sum(self.linear(Role.CROSS_OUT, across(q).flatten(1))))
        return self._branch(x) if pre else self.norm(Role.CROSS_NORM, x)

    def entered(self, x: Tensor) -> Tensor:
        """Return what the projections read of the layer's input `(T, C)`: its norm if `place` is "pre"."""
        return x if self.spec.place == "post" else self.norm(Role.ATTN_NORM, x)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows `(T, C)` to queries `(T, H, D)`, keys and values `(T, K, D)`."""
        q, k, v, _ = self._project(x)
        return q, k, v

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project rows `(T, C)` to queries, keys, values and the gate."""
        spec = self.spec
        weight = self.weights.matrices[Role.QKV]
        *parts, opening = times_apart(self.ops.linear.run, x.to(weight.computes_in), weight, spec.qkv_rows)
        q, k, v = (t.unflatten(-1, (-1, spec.head_dim)) for t in parts)
        if spec.value_norm:
            v = self.ops.norm.run(v if spec.values == "own" else k, None, None, spec=spec.norm)
        return q, k, v, opening

    def cross_keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project an encoder's states to keys and values.

        Args:
            states: `(N, Ce)`, of any number of sequences.

        Returns:
            `(N, K, D)` each, strided.
        """
        with self.weights.held():
            k, v = self.linear(Role.CROSS_KV, states).chunk(2, dim=-1)
        return k.unflatten(-1, (-1, self.spec.head_dim)), v.unflatten(-1, (-1, self.spec.head_dim))

    def _branch(self, x: Tensor) -> Tensor:
        return in_range(x) if self.spec.clamp == "branch" else x

    def _end(self, x: Tensor) -> Tensor:
        return x if self.spec.clamp is None else in_range(x)

    def _scaled(self, role: Role, branch: Tensor) -> Tensor:
        """Multiply a branch by `residual_scale` and by the role's vector per channel, where there are any."""
        branch = multiplied(branch, self.spec.residual_scale)
        vector = self.weights.vectors.get(role)
        return branch if vector is None or vector.weight is None else branch * vector.weight

    def norm(self, role: Role, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Normalise rows `(..., C)`; return them unchanged where the block has no norm of this role."""
        vector = self.weights.vectors.get(role)
        if vector is None:
            return x
        if self.spec.wide and vector.weight is not None:  # what reads it is in the layer's dtype
            x = x.to(vector.weight.dtype)
        return self.ops.norm.run(x, vector.weight, vector.bias, spec=norm or self.spec.norm)  # type: ignore[no-any-return]

    def linear(self, role: Role, x: Tensor) -> Tensor:
        """Multiply rows `(T, in)` by a matrix of the block and add its bias."""
        weight = self.weights.matrices[role]
        # A matrix kept in float32 (T5's last one) returns float32, and the residual stream continues in it.
        return times(self.ops.linear.run, x.to(weight.computes_in), weight)

    def attention(self, x: Tensor, rope: RopeTable | None, attend: Attend) -> Tensor:
        """Run the attention branch between its norms, `(T, C)` to `(T, C)`."""
        spec = self.spec
        if spec.latent is not None:
            return self._latent_attention(x, spec.latent, rope, attend)
        q, k, v, opening = self._project(x)
        k = multiplied(k, self._by.keys)
        after_rope = spec.qk_norm is not None and spec.qk_norm.after_rope
        if not after_rope:
            q, k = self._qk_norms(q, k)
        if spec.clip_qkv is not None:
            q, k, v = (t.clamp(-spec.clip_qkv, spec.clip_qkv) for t in (q, k, v))
        if spec.rope is not None:
            if rope is None:
                raise AssertionError("a block with a rotary embedding was run without its table")
            if isinstance(attend, Turning) and not after_rope:
                return self._leave(attend.turned(q, k, v, rope), opening)
            q, k = (self.ops.rope.run(t, *rope, interleaved=spec.rope.interleaved) for t in (q, k))
        if after_rope:
            q, k = self._qk_norms(q, k)
        return self._leave(attend(q, k, v), opening)

    def _leave(self, attended: Tensor, opening: Tensor) -> Tensor:
        """Gate the heads' output `(T, H, D)` by `opening`, if there is a gate, and project it to `(T, C)`."""
        if self.spec.gate is not None:
            attended = attended * opened(opening, self.spec.gate, attended)
        return self.linear(Role.ATTN_OUT, self.norm(Role.ATTN_INNER_NORM, attended.flatten(1)))

    def _qk_norms(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        spec, share = self.spec.qk_norm, self.share
        if spec is None or spec.over != "all" or share is None or share.tp.size == 1:
            return self._qk_norm(Role.Q_NORM, q), self._qk_norm(Role.K_NORM, k)
        width = {Role.Q_NORM: share.whole.q_dim, Role.K_NORM: share.whole.kv_dim}
        counts = {Role.Q_NORM: True, Role.K_NORM: share.counts_keys}
        rows = {Role.Q_NORM: q, Role.K_NORM: k}
        vectors = {role: v for role, v in self.weights.vectors.items() if role in rows}
        parts = [(rows[role], v.weight, v.bias, width[role], counts[role]) for role, v in vectors.items()]
        rows |= dict(zip(vectors, norm_across(parts, spec.norm, share.tp), strict=True))
        return rows[Role.Q_NORM], rows[Role.K_NORM]

    def _latent_attention(self, x: Tensor, latent: Latent, rope: RopeTable | None, attend: Attend) -> Tensor:
        """Run latent attention: `attend` gets latents and shared keys in place of keys and values."""
        if rope is None and self.spec.rope is not None:
            raise AssertionError("a block with a rotary embedding was run without its table")

        def project(name: str, y: Tensor) -> Tensor:
            if name == "norm":
                return self.norm(Role.KV_DOWN_NORM, y, latent.norm)
            if name == "latents":
                return self.linear(Role.KV_DOWN, y)
            if latent.query_rank is not None:
                y = self.norm(Role.Q_DOWN_NORM, self.linear(Role.Q_DOWN, y), latent.norm)
            return self.linear(Role.Q_UP, y)

        def rotate(y: Tensor) -> Tensor:
            if self.spec.rope is None or rope is None:
                return y
            rotated: Tensor = self.ops.rope.run(y, *rope, interleaved=self.spec.rope.interleaved)
            return rotated

        attended = attend(*queries_and_latents(x, latent, project, rotate))
        return self._leave(attended, x if self.spec.gate is None else self.linear(Role.ATTN_GATE, x))

    def _qk_norm(self, role: Role, x: Tensor) -> Tensor:
        """Normalise `(T, heads, D)` over each head or over all heads together."""
        spec, vector = self.spec.qk_norm, self.weights.vectors.get(role)
        if spec is None or vector is None:
            return x
        if spec.over == "all":
            return self.norm(role, x.flatten(1), spec.norm).view(x.shape)
        weight = vector.weight
        if weight is not None and weight.numel() == x.shape[1] * x.shape[2]:
            weight = weight.view(x.shape[1:])
        return self.ops.norm.run(x, weight, vector.bias, spec=spec.norm)  # type: ignore[no-any-return]

    def feed_forward(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """Run the feed-forward branch between its norms.

        Args:
            x: `(T, C)`, its normalised input.
            stream: `(T, C)`, the residual stream, which experts beside the shared ones read.

        Returns:
            `(T, C)`.
        """
        if self.spec.moe is None:
            return multiplied(self.dense(x, Role.MLP_IN, Role.MLP_OUT), self._by.feed_out)
        return run_experts(self, self.spec.moe, x, stream)

    def mix(self, x: Tensor, router: Weight | Routed, choice: Tensor | None = None) -> Tensor:
        """Run this block's experts on `(T, C)`, routed by a router matrix or by an earlier choice."""
        experts = (self.weights.matrices[role] for role in (Role.EXPERTS_IN, Role.EXPERTS_OUT))
        options = {"spec": self.spec.moe, "activation": self.spec.activation, "gated": self.spec.gated}
        mixed: Tensor = self.ops.moe.run(x, router, *experts, **options, choice=choice)
        return mixed

    def dense(self, x: Tensor, first: Role, second: Role) -> Tensor:
        """Run two matrices of the block with the activation between them, on `(T, C)`."""
        y, learned = self.linear(first, x), self.weights.vectors.get(Role.ACTIVATION)
        if self._by.gate != 1.0:
            gate, *up = y.chunk(2, dim=-1) if self.spec.gated else (y,)
            y = torch.cat([gate * self._by.gate, *up], dim=-1)
        y = sparse(y, self.spec.sparsity, gated=self.spec.gated)
        if learned is not None and learned.weight is not None:
            y = xielu(y, learned.weight)
        else:
            y = self.ops.activation.run(y, name=self.spec.activation, gated=self.spec.gated)
        return self.linear(second, self.norm(Role.MLP_INNER_NORM, y))

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move or cast every tensor, as `nn.Module._apply` does; streamed matrices do not move.

        Raises:
            UnsupportedError: Streamed matrices would be cast.
        """
        self.weights = self.weights.apply(fn)
        sinks, alibi = self.weights.vectors.get(Role.SINKS), self.mask.alibi
        moved = None if alibi is None else alibi.to(self.weights.device)
        self.mask = replace(self.mask, alibi=moved, sinks=None if sinks is None else sinks.weight)
