"""Swin and similar models: ViT's layer within windows of an image, shifted by half in every other layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.families.family import Config, Family, Heads, OwnAttention, Tiny
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import First, Recipe, Stack, Take

__all__ = ["SWIN_RECIPES", "SWIN_TINY", "swin_layer", "window_wise"]

_BERT = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))
SWIN_RECIPES: Mapping[Role, Recipe] = {
    Role.ATTN_NORM: Take("layernorm_before"),
    Role.QKV: First((Stack(tuple(f"attention.{part}_proj" for part in "qkv")), Stack(_BERT))),
    Role.ATTN_OUT: First((Take("attention.o_proj"), Take("attention.output.dense"))),
    Role.MLP_NORM: Take("layernorm_after"),
    Role.MLP_IN: First((Take("mlp.fc1"), Take("intermediate.dense"))),
    Role.MLP_OUT: First((Take("mlp.fc2"), Take("output.dense"))),
}


def swin_layer(layer: Any, config: Config) -> BlockSpec:
    """Return a layer's spec; each stage has its own width and number of heads."""
    attention = getattr(layer.attention, "self", layer.attention)
    width, heads = layer.layernorm_before.normalized_shape[0], attention.num_attention_heads
    return BlockSpec(
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=int(config.mlp_ratio * width),
        norm=Norm("layer", config.layer_norm_eps),
        activation=config.hidden_act,
        gated=False,
        scale=(width // heads) ** -0.5,
        causal=False,
        own_attention=True,
    )


def _attend(
    heads: Heads, layer: Any, given: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    if not given.get("always_partition", False):
        layer.set_shift_and_window_size(tuple(given["input_dimensions"]))
    return (window_wise(heads, layer, given["input_dimensions"], (q, k, v), _bias),)


def window_wise(
    heads: Heads,
    layer: Any,
    size: tuple[int, int],
    rows: tuple[Tensor, Tensor, Tensor],
    bias: Callable[[Any, tuple[int, int], Tensor], Tensor],
    turned: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Attend within each window.

    An image that windows do not divide evenly is padded with zeros after the norm, so the projections of
    zeros take part in attention.

    Args:
        heads: The layer's heads.
        layer: Has the width of windows, and by how much they are shifted.
        size: Height and width of the image.
        rows: Queries, keys and values `(B, S, H, D)`.
        bias: Called with the layer, the size of the padded image, and a tensor of the wanted dtype and
            device; returns what is added to the scores, `(windows | 1, H, L, L)`.
        turned: Called with the layer, and the windows' queries and keys `(N, H, L, D)`; returns their
            replacements. None for no change.

    Returns:
        The attention's output, `(B, S, H, D)`.
    """
    (height, width), (q, k, v), side = size, rows, int(layer.window_size)
    down, right = -height % side, -width % side
    shift = int(layer.shift_size)

    def windows(rows: Tensor, filling: Tensor) -> Tensor:
        """Split `(B, S, H, D)` into windows `(B * windows, H, side * side, D)`."""
        grid = rows.view(rows.shape[0], height, width, -1)
        if down or right:
            edges = [0, 0, 0, right, 0, down]
            outside = torch.constant_pad_nd(grid.new_zeros(height, width, 1), edges, 1.0)
            grid = torch.constant_pad_nd(grid, edges) + outside * filling.reshape(-1)
        if shift:
            grid = grid.roll((-shift, -shift), (1, 2))
        cut = grid.unflatten(1, (-1, side)).unflatten(3, (-1, side)).transpose(2, 3).flatten(0, 2)
        heads_of: Tensor = cut.flatten(1, 2).unflatten(-1, rows.shape[2:])
        return heads_of.transpose(1, 2)

    fill = heads.of(q.new_zeros(1, heads.entered.shape[-1])) if down or right else (q, k, v)
    queries, keys, values = (windows(*pair) for pair in zip((q, k, v), fill, strict=True))
    added = bias(layer, (height + down, width + right), q)
    if len(added) > 1:
        added = added.repeat(len(queries) // len(added), 1, 1, 1)
    if turned is not None:
        queries, keys = turned(layer, queries, keys)
    out = heads.attend(queries, keys, values, added)
    grid = out.view(-1, (height + down) // side, (width + right) // side, side, side, *q.shape[2:])
    grid = grid.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    if shift:
        grid = grid.roll((shift, shift), (1, 2))
    return grid[:, :height, :width].reshape(q.shape)


def _bias(layer: Any, size: tuple[int, int], like: Tensor) -> Tensor:
    """Return the layer's bias by relative position, plus the mask between parts of a shifted window."""
    mask = layer.get_attn_mask(*size, dtype=like.dtype, device=like.device)
    own = getattr(layer.attention, "self", None)
    if own is None:
        bias: Tensor = layer.attention.relative_position_bias()
    else:
        rows = own.relative_position_bias_table[own.relative_position_index.flatten()]
        bias = rows.view(*own.relative_position_index.shape, -1).permute(2, 0, 1)[None]
    return bias if mask is None else bias + mask[:, None]


SWIN_TINY: Mapping[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "mlp_ratio": 2.0,
}


def _tiny(label: str = "", prefix: str = "Swin", **options: Any) -> Tiny:
    return Tiny(f"{prefix}ForImageClassification", f"{prefix}Config", {**SWIN_TINY, **options}, label)


FAMILY = Family(
    name="swin",
    layers=("SwinLayer", "DonutSwinLayer", "ClapAudioLayer"),
    spec=lambda config, index: swin_layer(None, config),
    measure=swin_layer,
    recipes=SWIN_RECIPES,
    ignored=("*.relative_position_bias_table",),
    attention=OwnAttention(_attend, frozenset({"input_dimensions", "always_partition"})),
    tiny=(
        _tiny(),
        _tiny("filled up", image_size=28, qkv_bias=False),
        _tiny("donut", "DonutSwin", image_size=28),
    ),
)
