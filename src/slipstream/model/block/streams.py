"""A layer with several streams of states per token; `slipstream.spec.Streams` has the formulas.

Shapes: T packed tokens, S streams, C hidden, P width of the layer's own input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.model.block.block import Attend, Block, RopeTable
from slipstream.spec import Role

__all__ = ["join_streams", "run_streams", "split_streams"]

_LEAST_SQUARE = 1e-5
"""Bound of the mean square that a projected stream is divided by the root of."""


def run_streams(block: Block, x: Tensor, rope: RopeTable | None, attend: Attend, inputs: Tensor) -> Tensor:
    """Run a layer whose spec has `streams`, while its tensors hold their values.

    Args:
        block: The layer.
        x: `(T, S, C)`; not changed.
        rope: The table for these tokens; ignored where the spec has no rope.
        attend: The caller's attention for this layer.
        inputs: `(T, P)`, the layer's own input.

    Returns:
        `(T, S, C)`, a new tensor.
    """
    if (streams := block.spec.streams) is None:
        raise AssertionError("a layer with one stream was run as one with several")
    coefficients = block.linear(Role.STREAM_PREDICT, _routed(block, x[:, streams.active]))
    predicted = x + coefficients.unflatten(-1, (streams.count, streams.count)) @ x
    active = predicted[:, streams.active]
    normed = block.norm(Role.ATTN_NORM, active)
    narrow = block.linear(Role.NARROW_OUT, block.linear(Role.NARROW_IN, normed))
    attended = block.norm(Role.ATTN_POST_NORM, block.attention(normed, rope, attend))
    y = (active + attended + (normed + block.norm(Role.NARROW_NORM, narrow))) / math.sqrt(2)
    fed = block.feed_forward(block.norm(Role.MLP_NORM, y))
    y = y + block.norm(Role.MLP_POST_NORM, fed)
    weights = block.linear(Role.STREAM_CORRECT, _routed(block, y)) + 1.0
    corrected: Tensor = predicted + weights[:, :, None] * (y - active)[:, None]
    first, scale = corrected[:, streams.active], block.weights.vectors.get(Role.STREAM_SCALE)
    if streams.scaled and scale is not None and scale.weight is not None:
        first = first * scale.weight
    gate = block.ops.activation.run(
        block.linear(Role.INPUT_GATE, first), name=block.spec.activation, gated=False
    )
    corrected[:, 1:] += block.norm(Role.INPUT_NORM, block.linear(Role.INPUT_OUT, gate * inputs))[:, None]
    return corrected


def _routed(block: Block, x: Tensor) -> Tensor:
    """Return the weights `(T, S)` that rows `(T, C)` give to the streams."""
    normed = block.norm(Role.STREAM_NORM, x) * (1.0 / block.spec.hidden)
    return torch.tanh(block.linear(Role.STREAM_ROUTER, normed).float()).to(x.dtype)


def split_streams(x: Tensor, others: list[Tensor]) -> Tensor:
    """Return streams `(T, S, C)`: the first one `(T, C)`, and the others scaled to its size."""
    return torch.stack([x, *_of_size(x, others)], dim=1)


def join_streams(x: Tensor, others: list[Tensor]) -> Tensor:
    """Return the mean `(T, C)` of the first stream `(T, C)` and of the others, scaled to its size."""
    return torch.stack([x, *_of_size(x, others)]).mean(dim=0)


def _of_size(x: Tensor, others: list[Tensor]) -> list[Tensor]:
    size = x.square().mean(dim=-1, keepdim=True).sqrt()
    return [
        other * size / other.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
        for other in others
    ]
