"""Mixtures of experts in a block: routed experts, alone or with shared ones, on one rank or several.

Shapes: T packed tokens, C hidden, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.ops.moe import Routed, chosen_by
from slipstream.parallel.experts import spread_experts
from slipstream.spec import MoE, Role

if TYPE_CHECKING:
    from slipstream.model.block.block import Block

__all__ = ["run_experts"]


def run_experts(block: Block, moe: MoE, x: Tensor, stream: Tensor | None) -> Tensor:
    """Run a block's routed and shared experts.

    Args:
        block: A block with experts.
        moe: Its mixture.
        x: `(T, C)`, the branch's normalised input.
        stream: `(T, C)`, the residual stream; needed where `moe.beside`.

    Returns:
        `(T, C)`; where layers are split, a partial result that the ranks still have to sum.
    """
    if moe.beside:
        return _beside(block, moe, x, stream)
    router, vector = block.weights.matrices[Role.ROUTER], block.weights.vectors.get(Role.ROUTER_BIAS)
    choice = None if vector is None else vector.weight
    if block.share is not None and block.share.spreads_experts:
        out = _spread(block, x, chosen_by(x, router, moe, choice))
    else:
        out = block.mix(x, router, choice)
    if not moe.shared:
        return out
    shared = block.dense(x, Role.SHARED_IN, Role.SHARED_OUT)
    if moe.residual:
        both = block.linear(Role.SHARED_GATE, x).softmax(-1)
        return out * both[:, :1] + shared * both[:, 1:]
    if moe.shared_gate:
        shared = shared * torch.sigmoid(block.linear(Role.SHARED_GATE, x))
    return out + shared


def _beside(block: Block, moe: MoE, x: Tensor, stream: Tensor | None) -> Tensor:
    """Run shared and routed experts as two branches, each between norms of its own."""
    if stream is None:
        raise AssertionError("experts beside the shared ones need the residual stream")
    shared = block.norm(Role.SHARED_POST_NORM, block.dense(x, Role.SHARED_IN, Role.SHARED_OUT))
    scored = block.norm(Role.ROUTER_NORM, stream) * moe.router_scale
    weights, chosen = chosen_by(scored, block.weights.matrices[Role.ROUTER], moe, None)
    scale = block.weights.vectors.get(Role.EXPERTS_SCALE)
    if scale is not None and scale.weight is not None:
        weights = weights * scale.weight[chosen]
    rows = block.norm(Role.EXPERTS_NORM, stream)
    spreads = block.share is not None and block.share.spreads_experts
    mixed = _spread(block, rows, (weights, chosen)) if spreads else block.mix(rows, (weights, chosen))
    return shared + block.norm(Role.EXPERTS_POST_NORM, mixed)


def _spread(block: Block, x: Tensor, routed: Routed) -> Tensor:
    if block.share is None:
        raise AssertionError("only experts of several ranks are spread")
    return spread_experts(block, block.share, block.mix, x, routed)
