"""Describes mixtures of experts as structs of the native library."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, SCORINGS, address
from slipstream.kernels.cpu.matrix import kept_matrix
from slipstream.kernels.cpu.norm import norm_of
from slipstream.kernels.requirements import BlockLike
from slipstream.spec import MoE, Role

__all__ = ["mixture_of", "routing_of"]

_SHARED = {
    Role.ROUTER: "router",
    Role.SHARED_IN: "shared_in",
    Role.SHARED_OUT: "shared_out",
    Role.SHARED_GATE: "shared_gate",
}
_NORMS = {
    Role.ROUTER_NORM: "router_norm",
    Role.EXPERTS_NORM: "entry_norm",
    Role.SHARED_POST_NORM: "shared_norm",
    Role.EXPERTS_POST_NORM: "norm",
}
_EXPERTS = {Role.EXPERTS_IN: "experts_in", Role.EXPERTS_OUT: "experts_out"}
_RANKED_BY_CHOICE = ("softmax_topk", "sigmoid", "topk_sigmoid")
"""Scorings to which a bias that only chooses is added."""


def mixture_of(moe: MoE, block: BlockLike, memory: list[Any]) -> abi.Moe:
    """Describe a block's mixture of experts to the library.

    Args:
        moe: Of the block.
        block: Accepted by `refuse_block`.
        memory: Receives the objects, other than tensors, that the struct points to.
    """
    matrices, vectors = block.weights.matrices, block.weights.vectors
    bias = vectors.get(Role.ROUTER_BIAS)
    struct = routing_of(moe, None if bias is None else bias.weight)
    struct.shared, struct.beside, struct.router_scale = moe.shared, int(moe.beside), moe.router_scale
    for role, name in _NORMS.items():
        setattr(struct, name, norm_of(vectors.get(role), block.spec.norm))
    scale = vectors.get(Role.EXPERTS_SCALE)
    if scale is not None and scale.weight is not None:
        struct.expert_scale, struct.expert_scale_dtype = address(scale.weight), DTYPES[scale.weight.dtype]
    for role, name in _SHARED.items():
        if role in matrices:
            setattr(struct, name, kept_matrix(matrices[role], memory))
    for role, name in _EXPERTS.items():
        each = (kept_matrix(matrices[role], memory, expert) for expert in range(moe.experts))
        memory.append((abi.Matrix * moe.experts)(*each))
        setattr(struct, name, ctypes.addressof(memory[-1]))
    memory.append(struct)
    return struct


def routing_of(moe: MoE, choice: Tensor | None) -> abi.Moe:
    """Describe to the library how experts are chosen, without their matrices.

    Args:
        moe: Scoring and what follows it.
        choice: `(E,)`, what is added to the scores only to choose the experts; must be kept alive.
    """
    ranks_by_choice = choice is not None and moe.scoring in _RANKED_BY_CHOICE
    return abi.Moe(
        experts=moe.experts,
        top_k=moe.top_k,
        groups=moe.groups,
        top_groups=moe.top_groups,
        choice=address(choice) if ranks_by_choice else None,
        choice_dtype=DTYPES[choice.dtype] if choice is not None and ranks_by_choice else 0,
        jitter=moe.jitter,
        more_sum=moe.more_sum,
        least_sum=moe.least_sum,
        factor=moe.factor,
        scoring=SCORINGS[moe.scoring],
        normalize=int(moe.normalize),
        sums_two=int(moe.group_score == "top2"),
        weighs_input=int(moe.weighs_input),
    )
