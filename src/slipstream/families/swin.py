"""Swin and similar models: ViT's layer within windows of an image, shifted by half in every other layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slipstream.families.family import Config, Family, Heads, OwnAttention, Tiny
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import First, Recipe, Stack, Take

__all__ = ["SWIN_RECIPES", "SWIN_TINY", "enter_windows", "parts_mask", "swin_layer", "window_wise"]

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


def _enter(layer: Any, given: Mapping[str, Any], rows: Tensor) -> Tensor:
    if not given.get("always_partition", False):
        layer.set_shift_and_window_size(tuple(given["input_dimensions"]))
    return enter_windows(layer, given, rows)


def _attend(
    heads: Heads, layer: Any, given: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    return (window_wise(heads, layer, given["input_dimensions"], (q, k, v), _bias),)


def enter_windows(layer: Any, given: Mapping[str, Any], rows: Tensor) -> Tensor:
    """Put normalised rows `(B, S, C)` in the order of windows, `(B * windows, side * side, C)`.

    An image that windows do not divide evenly is padded with zeros, so the projections of zeros take part in
    attention.
    """
    order = _order_of(layer, given["input_dimensions"], rows.device)
    entered = rows.index_select(1, order.entered)
    if order.outside is not None:
        entered.masked_fill_(order.outside[:, None], 0.0)
    return entered.view(-1, int(layer.window_size) ** 2, rows.shape[-1])


def window_wise(
    heads: Heads,
    layer: Any,
    size: tuple[int, int],
    rows: tuple[Tensor, Tensor, Tensor],
    bias: Callable[[Any, tuple[int, int], Tensor], Tensor],
    turned: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Attend within each window.

    Args:
        heads: The layer's heads.
        layer: Has the width of windows, and by how much they are shifted.
        size: Height and width of the image.
        rows: Queries, keys and values `(B * windows, L, H, D)`, in the order of `enter_windows`.
        bias: Called with the layer, the size of the padded image, and a tensor of the wanted dtype and
            device; returns what is added to the scores, `(windows | 1, H, L, L)`.
        turned: Called with the layer, and the windows' queries and keys `(N, H, L, D)`; returns their
            replacements. None for no change.

    Returns:
        The attention's output, `(B, S, H, D)`, in the order of the image.
    """
    queries, keys, values = (t.transpose(1, 2) for t in rows)
    order, side = _order_of(layer, size, queries.device), int(layer.window_size)
    added = bias(layer, (size[0] + -size[0] % side, size[1] + -size[1] % side), queries)
    if len(added) > 1:
        added = added.repeat(len(queries) // len(added), 1, 1, 1)
    if turned is not None:
        queries, keys = turned(layer, queries, keys)
    out = heads.attend(queries, keys, values, added)
    places = out.view(-1, len(order.entered), math.prod(out.shape[2:]))
    image: Tensor = places.index_select(1, order.left).unflatten(-1, out.shape[2:])
    return image


@dataclass(frozen=True)
class _Order:
    """Where rows of an image are among those of its windows.

    Attributes:
        entered: `(windows * side * side,)`: the image's row at each place of a window.
        left: `(S,)`: the place of each of the image's rows.
        outside: Like `entered`, true at places outside of the image; None if there are none.
    """

    entered: Tensor
    left: Tensor
    outside: Tensor | None


_LARGEST_KEPT = 1 << 16
"""Rows of the largest image whose order is kept: 1 MiB. Making one takes 0.1 ms, as long as a norm."""


def _order_of(layer: Any, size: tuple[int, int], device: torch.device) -> _Order:
    height, width = (int(length) for length in size)
    # Memory of other devices may belong to a graph that is being captured.
    keeps = device.type == "cpu" and height * width <= _LARGEST_KEPT
    make = _order if keeps else _order.__wrapped__
    return make(height, width, int(layer.window_size), int(layer.shift_size), device)


@functools.lru_cache(maxsize=16)
def _order(height: int, width: int, side: int, shift: int, device: torch.device) -> _Order:
    down, right, count = -height % side, -width % side, height * width
    grid = torch.arange(count, device=device).view(height, width)
    grid = torch.constant_pad_nd(grid, [0, right, 0, down], count)
    if shift:
        grid = grid.roll((-shift, -shift), (0, 1))
    entered = grid.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2).flatten()
    left = entered.argsort()[:count]
    if not down and not right:
        return _Order(entered, left, None)
    return _Order(entered.clamp(max=count - 1), left, entered == count)


def _bias(layer: Any, size: tuple[int, int], like: Tensor) -> Tensor:
    """Return the layer's bias by relative position, plus the mask between parts of a shifted window."""
    mask = parts_mask(layer, size, like, takes_device=True)
    own = getattr(layer.attention, "self", None)
    if own is None:
        bias: Tensor = layer.attention.relative_position_bias()
    else:
        rows = own.relative_position_bias_table[own.relative_position_index.flatten()]
        bias = rows.view(*own.relative_position_index.shape, -1).permute(2, 0, 1)[None]
    return bias if mask is None else bias + mask[:, None]


_LARGEST_MASK = 1 << 20
"""Numbers of the largest mask that is kept: 4 MiB in float32. Making one of 64 windows of 49 takes 0.6 ms."""


def parts_mask(layer: Any, size: tuple[int, int], like: Tensor, *, takes_device: bool) -> Tensor | None:
    """Return the layer's mask between parts of a shifted window, `(windows, L, L)`, or None without a shift.

    Args:
        layer: Has `get_attn_mask`.
        size: Height and width of the padded image.
        like: Has the wanted dtype and device.
        takes_device: Whether every version of `get_attn_mask` takes a device.
    """
    make, side, shift = layer.get_attn_mask, int(layer.window_size), int(layer.shift_size)
    known = getattr(make, "__module__", "").startswith("transformers.")
    # Memory of other devices may belong to a graph that is being captured.
    keeps = like.device.type == "cpu" and math.prod(size) * side * side <= _LARGEST_MASK
    at = (("device", like.device),) if takes_device else ()
    # Where it is not told a device, it uses the default one, which may be another in this call.
    with like.device:
        if known and keeps:
            return _mask(make.__func__, size, side, shift, (("dtype", like.dtype), *at))
        mask: Tensor | None = make(*size, dtype=like.dtype, **dict(at))
        return None if mask is None else mask.to(like.device)


@functools.lru_cache(maxsize=8)
def _mask(
    make: Callable[..., Tensor | None],
    size: tuple[int, int],
    side: int,
    shift: int,
    given: tuple[tuple[str, Any], ...],
) -> Tensor | None:
    """Call a layer class's `get_attn_mask` with what it reads of its layer."""
    return make(SimpleNamespace(window_size=side, shift_size=shift), *size, **dict(given))


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
    attention=OwnAttention(_attend, frozenset({"input_dimensions", "always_partition"}), enter=_enter),
    tiny=(
        _tiny(),
        _tiny("filled up", image_size=28, qkv_bias=False),
        _tiny("donut", "DonutSwin", image_size=28),
    ),
)
