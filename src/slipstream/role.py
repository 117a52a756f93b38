"""Roles of a block's tensors: the vocabulary that families, weights, kernels and sharding have in common."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

__all__ = ["SECOND", "Role"]


class Role(StrEnum):
    """Purpose of a tensor; decides its canonical layout, its sharding, and whether it may be quantized.

    Matrices are stored `(out, in)`. The rows of `QKV` are `[q | k | v]`, or `[q | k | v | gate]` where the
    attention output is gated; those of `CROSS_KV` are `[k | v]`, and those of a gated `MLP_IN` are
    `[gate | up]`. Expert matrices have the expert as first dimension: `(experts, out, in)`.
    `ATTN_SCALE` and `MLP_SCALE` multiply a branch, one number per channel, before it is added.
    `ATTN_INNER_NORM` and `MLP_INNER_NORM` normalise the inputs of `ATTN_OUT` and `MLP_OUT`.
    `ACTIVATION` holds the parameters of a learned activation.
    `INPUT_GATE`, `INPUT_OUT` and `INPUT_NORM` belong to the branch that reads the per-layer input;
    `LAYER_SCALE` multiplies the layer's output.
    `STREAM_...` and `NARROW_...` belong to layers with several streams of states, see `Streams`.
    `ROUTER_BIAS` is added to the experts' scores for the top-k choice only, not to their weights.
    `ROUTER_NORM`, `EXPERTS_NORM`, `EXPERTS_POST_NORM` and `SHARED_POST_NORM` normalise the inputs and outputs
    of experts that are a branch beside the shared ones; `EXPERTS_SCALE` multiplies each expert's weight.
    `SECOND_...` are the roles of the second half of a layer that has every branch twice.
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
    ATTN_GATE = "attn_gate"
    ATTN_INNER_NORM = "attn_inner_norm"
    ATTN_OUT = "attn_out"
    ATTN_POST_NORM = "attn_post_norm"
    ATTN_SCALE = "attn_scale"
    CROSS_NORM = "cross_norm"
    CROSS_Q = "cross_q"
    CROSS_KV = "cross_kv"
    CROSS_OUT = "cross_out"
    CROSS_POST_NORM = "cross_post_norm"
    MLP_NORM = "mlp_norm"
    MLP_IN = "mlp_in"
    ACTIVATION = "activation"
    MLP_INNER_NORM = "mlp_inner_norm"
    MLP_OUT = "mlp_out"
    MLP_POST_NORM = "mlp_post_norm"
    MLP_SCALE = "mlp_scale"
    INPUT_GATE = "input_gate"
    INPUT_OUT = "input_out"
    INPUT_NORM = "input_norm"
    LAYER_SCALE = "layer_scale"
    STREAM_NORM = "stream_norm"
    STREAM_ROUTER = "stream_router"
    STREAM_PREDICT = "stream_predict"
    STREAM_CORRECT = "stream_correct"
    STREAM_SCALE = "stream_scale"
    NARROW_IN = "narrow_in"
    NARROW_OUT = "narrow_out"
    NARROW_NORM = "narrow_norm"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    ROUTER_NORM = "router_norm"
    EXPERTS_IN = "experts_in"
    EXPERTS_OUT = "experts_out"
    EXPERTS_NORM = "experts_norm"
    EXPERTS_POST_NORM = "experts_post_norm"
    EXPERTS_SCALE = "experts_scale"
    SHARED_IN = "shared_in"
    SHARED_OUT = "shared_out"
    SHARED_POST_NORM = "shared_post_norm"
    SHARED_GATE = "shared_gate"
    SECOND_ATTN_NORM = "second_attn_norm"
    SECOND_Q_DOWN = "second_q_down"
    SECOND_Q_DOWN_NORM = "second_q_down_norm"
    SECOND_Q_UP = "second_q_up"
    SECOND_KV_DOWN = "second_kv_down"
    SECOND_KV_DOWN_NORM = "second_kv_down_norm"
    SECOND_KV_UP = "second_kv_up"
    SECOND_ATTN_OUT = "second_attn_out"
    SECOND_MLP_NORM = "second_mlp_norm"
    SECOND_MLP_IN = "second_mlp_in"
    SECOND_MLP_OUT = "second_mlp_out"

    @property
    def kind(self) -> Role:
        """The role without its `SECOND_` prefix; any other role is its own kind."""
        return _KINDS.get(self, self)

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor is a matrix of a linear; the others are norms and small vectors."""
        return self.is_quantizable or self.kind in _DENSE

    @property
    def is_cross(self) -> bool:
        """Whether the role belongs to cross-attention over an encoder's states."""
        return self.value.startswith("cross_")

    @property
    def is_quantizable(self) -> bool:
        """Whether the role may be stored in a weight format; routers may not, being small but decisive."""
        return self.kind in _QUANTIZABLE


_DENSE = frozenset(
    {
        Role.ROUTER,
        Role.SHARED_GATE,
        Role.KV_UP,
        Role.ATTN_GATE,
        Role.STREAM_ROUTER,
        Role.STREAM_PREDICT,
        Role.STREAM_CORRECT,
    }
)
"""Matrices that are never stored in a weight format."""

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
        Role.INPUT_GATE,
        Role.INPUT_OUT,
        Role.NARROW_IN,
        Role.NARROW_OUT,
    }
)

SECOND: Final[Mapping[Role, Role]] = MappingProxyType(
    {Role(role.removeprefix("second_")): role for role in Role if role.startswith("second_")}
)
"""By role of the first half, the same role in a layer's second half."""

_KINDS = {second: role for role, second in SECOND.items()}
