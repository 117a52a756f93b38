"""Block-local attention (LongT5): a block attends to itself, its neighbours, and sums of all other blocks.

Shapes: B batch, S tokens, N blocks, W tokens of a block, L = 3 W + G keys, G sums, H heads, D head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.families.family import Heads

__all__ = ["block_wise", "in_blocks", "with_neighbours"]


def in_blocks(rows: Tensor, size: int) -> Tensor:
    """Split `(B, S, ...)` into blocks `(B, N, W, ...)`, padded with zeros."""
    missing = -rows.shape[1] % size
    if missing:
        rows = torch.constant_pad_nd(rows, [*(0, 0) * (rows.dim() - 2), 0, missing])
    cut: Tensor = rows.unflatten(1, (-1, size))
    return cut


def with_neighbours(blocks: Tensor) -> Tensor:
    """Extend `(B, N, W, ...)` to `(B, N, 3 W, ...)`: previous, own and next block; zeros at the ends."""
    padded = torch.constant_pad_nd(blocks, [*(0, 0) * (blocks.dim() - 2), 1, 1])
    return torch.cat([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], dim=2)


def block_wise(
    heads: Heads, layer: Any, given: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """Run the attention of LongT5's encoder; the first layer makes the bias, mask included, for all layers.

    Source: Guo et al. 2021 (arXiv 2112.07916), section 3.
    """
    attention = next(part for name, part in layer.layer[0].named_children() if name.endswith("SelfAttention"))
    size, length = attention.block_len, q.shape[1]
    mask, bias = given.get("attention_mask"), given.get("position_bias")
    queries = in_blocks(q, size)
    keys, values = (with_neighbours(in_blocks(t, size)) for t in (k, v))
    if hasattr(attention, "global_block_size"):
        mask = q.new_ones(q.shape[:2]) if mask is None else mask
        sums, seen = _sums(attention, heads.entered, mask)
        _, side_k, side_v = heads.of(sums)
        many = queries.shape[1]
        keys = torch.cat([keys, side_k[:, None].expand(-1, many, -1, -1, -1)], dim=2)
        values = torch.cat([values, side_v[:, None].expand(-1, many, -1, -1, -1)], dim=2)
        bias = _global_bias(attention, mask, seen) if bias is None else bias
    elif bias is None:
        bias = _local_bias(attention, mask)
    by_block, keys, values = (t.flatten(0, 1).transpose(1, 2) for t in (queries, keys, values))
    attended = heads.attend(by_block, keys, values, _for_blocks(bias, queries).to(q.dtype))
    return attended.unflatten(0, queries.shape[:2]).flatten(1, 2)[:, :length], bias


def _for_blocks(bias: Tensor, queries: Tensor) -> Tensor:
    """Expand a bias `(B | 1, N | 1, H, W, L)` to all blocks of all rows, `(B * N | 1, H, W, L)`."""
    if bias.shape[0] * bias.shape[1] == 1:
        return bias[0]
    return bias.expand(*queries.shape[:2], -1, -1, -1).flatten(0, 1)


def _own_bias(attention: Any) -> Tensor:
    """Return the layer's bias by relative position, or zeros, `(1, 1, H, W, 3 W)`."""
    if attention.has_relative_attention_bias:
        made: Tensor = attention.compute_bias(attention.block_len)
        return made
    size = attention.block_len
    return torch.zeros(1, 1, attention.n_heads, size, 3 * size, dtype=torch.float32, device="cpu")


_HIDDEN = -1e10
"""What the original adds to the scores of masked keys."""


def _local_bias(attention: Any, mask: Tensor | None) -> Tensor:
    bias = _own_bias(attention)
    if mask is None:
        return bias
    return bias + torch.where(mask > 0, 0.0, _HIDDEN).transpose(1, 2)


def _global_bias(attention: Any, mask: Tensor, seen: Tensor) -> Tensor:
    """Return the bias with columns for sums; `mask` is `(B, S)`, `seen` `(B, G)`: whether a sum exists."""
    size = attention.block_len
    blocks = in_blocks(mask, size)
    near = (blocks[..., None] != 0) & (with_neighbours(blocks)[:, :, None] != 0)
    places = torch.arange(3 * size, device=mask.device)
    apart = (places[None] - places[size : 2 * size, None]).abs()
    near = near & (apart < size)
    local = _own_bias(attention).to(mask.device) + torch.where(near, 0.0, _HIDDEN)[:, :, None]
    side = attention.compute_side_bias(mask, seen).transpose(1, 2)  # `(B, S, H, G)`
    return torch.cat(
        [local.expand(*blocks.shape[:2], -1, -1, -1), in_blocks(side, size).transpose(2, 3)], dim=-1
    )


def _sums(attention: Any, entered: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's normalised sum of states, `(B, G, C)`, and which of the sums exist, `(B, G)`."""
    # The rule of which token belongs to which sum is taken from the model's own module.
    own = importlib.import_module(type(attention).__module__)
    blocks, seen = own._make_global_fixed_block_ids(mask, attention.global_block_size)
    count = seen.shape[-1]
    places = torch.arange(count, device=blocks.device)
    one_hot = (blocks[..., None] == places).to(entered.dtype)
    sums: Tensor = attention.global_input_layer_norm(one_hot.transpose(1, 2) @ entered)
    return sums, seen
