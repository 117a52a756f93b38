"""Cross-attention over an encoder's states, whose keys and values are computed once, and position biases.

Shapes: B batch, S queries, M states of the encoder, C hidden, H heads, K kv heads, D head dim, L keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.block.block import Block, CrossAttend
from slipstream.parallel.shard import Share

__all__ = [
    "CrossCall",
    "Relative",
    "add_bias",
    "attend_across",
    "own_heads",
    "read_cross",
    "relative_of",
    "zeros",
]


_asked: tuple[weakref.ref[Tensor] | None, int, bool] = (None, 0, False)
"""The last mask that `_leaves_nothing` examined, its version, and the result."""


@dataclass(frozen=True)
class Relative:
    """How a layer's relative position bias is computed.

    Attributes:
        make: Takes queries `(B, H, S, D)`, the number of keys and the number of tokens seen before; returns a
            bias `(1, H, S, L)`.
        causal: Whether a missing mask means causality; in some versions of transformers, not for UMT5.
    """

    make: Callable[[Tensor, int, Any], Tensor]
    causal: bool


@dataclass(frozen=True)
class CrossCall:
    """Arguments of one call of a layer that concern the encoder.

    Attributes:
        states: The encoder's states, `(B, M, C)`.
        mask: 4-D mask (bool or additive) over the states, or None.
        bias: Added to the scores, `(1, H, S, M)`, or None.
        caches: transformers' pair of caches (`EncoderDecoderCache`), or None where nothing is cached.
    """

    states: Tensor
    mask: Tensor | None
    bias: Tensor | None
    caches: Any


def read_cross(given: dict[str, Any], hidden: Tensor, cache: Any) -> CrossCall | None:
    """Take the arguments that concern an encoder out of a call's arguments.

    Args:
        given: The arguments by name; those that are read are removed.
        hidden: Hidden states `(B, S, C)`.
        cache: The cache that transformers passed.

    Returns:
        The call, or None where a block cannot serve it: states of another batch size, a mask of another
        length, or a single cache for both kinds of attention, in which transformers mixes them.
    """
    states = given.pop("encoder_hidden_states", None)
    mask = given.pop("encoder_attention_mask", None)
    bias = given.pop("encoder_decoder_position_bias", None)
    if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[0] != hidden.shape[0]:
        return None
    if any(part is not None and (not isinstance(part, Tensor) or part.dim() != 4) for part in (mask, bias)):
        return None
    if mask is not None and mask.shape[-1] not in (1, states.shape[1]):
        return None
    if cache is not None and not hasattr(cache, "cross_attention_cache"):
        return None
    return CrossCall(states, mask, bias, cache)


def attend_across(block: Block, call: CrossCall, layer_index: int) -> CrossAttend:
    """Return a layer's cross-attention over an encoder's states, as `Block` takes it.

    The first call with an empty cache computes keys and values; later calls read them from the cache.

    Args:
        block: The fused layer.
        call: The arguments that the model passed.
        layer_index: The layer's index in the caches.
    """
    batch = call.states.shape[0]

    def attend(q: Tensor) -> Tensor:
        q = q.unflatten(0, (batch, -1)).transpose(1, 2)
        k, v = _keys_and_values(block, call, layer_index)
        mask = None if call.mask is None else own_heads(call.mask, block.share)
        # A zero bias is a single number expanded with stride 0 (`zeros`); there is nothing to add.
        if call.bias is not None and any(call.bias.stride()):
            mask = add_bias(own_heads(call.bias, block.share).to(q.dtype), mask)
        elif block.spec.relative is not None and _leaves_nothing(mask):
            mask = add_bias(q.new_zeros(()), mask)  # additive, as in the original: such a row sees everything
        out: Tensor = block.ops.attention.run(
            q, k, v, mask=mask, causal=False, scale=block.spec.scale, softcap=block.spec.softcap, sinks=None
        )
        return out.flatten(0, 1)

    return attend


def _keys_and_values(block: Block, call: CrossCall, index: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, `(B, K, M, D)` each, from the cache if it has them."""
    caches = call.caches
    if caches is not None and caches.is_updated.get(index):
        cached = caches.cross_attention_cache.layers[index]
        return cached.keys, cached.values
    batch, length, _ = call.states.shape
    projected = block.cross_keys_values(call.states.flatten(0, 1))
    k, v = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in projected)
    if caches is not None:
        k, v = caches.cross_attention_cache.update(k, v, index)
        caches.is_updated[index] = True
    return k, v


def _leaves_nothing(mask: Tensor | None) -> bool:
    """Whether a bool mask hides all keys from some query; cached, as the layers of a forward share a mask."""
    global _asked
    if mask is None or mask.dtype != torch.bool:
        return False
    last, last_version, empty = _asked
    version = 0 if mask.is_inference() else mask._version
    if last is None or last() is not mask or last_version != version:
        empty = not bool(mask.any(-1).all())
        _asked = (weakref.ref(mask), version, empty)
    return empty


def own_heads(tensor: Tensor, share: Share | None) -> Tensor:
    """Cut a mask or bias `(B | 1, H | 1, S | 1, L)` to a rank's heads."""
    if share is None or tensor.shape[1] != share.whole.heads or share.whole.heads == 1:
        return tensor
    return tensor[:, share.heads.start : share.heads.stop]


def add_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Merge a bias and a mask (bool or additive) into one additive mask in the dtype of the bias."""
    if mask is None:
        return bias
    lowest = torch.finfo(bias.dtype).min
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, lowest)
    return (bias + mask.to(bias.dtype)).clamp(min=lowest)


def relative_of(layer: nn.Module, path: str | None) -> Relative | None:
    """Return how a layer's relative position bias is computed: by its module, or zeros if that has no table.

    Args:
        layer: The layer, with its own modules.
        path: Path of the module that has `compute_bias`, or None where the family has no such bias.
    """
    if path is None:
        return None
    part: Any = layer.get_submodule(path)

    def nothing(q: Tensor, keys: int, seen: Any) -> Tensor:
        return zeros(q.shape[1], q.shape[2], keys, dtype=q.dtype, device=q.device)

    def computed(q: Tensor, keys: int, seen: Any) -> Tensor:
        bias: Tensor = part.compute_bias(q.shape[2], keys, device=q.device, past_seen_tokens=seen)
        return bias

    make = computed if hasattr(part, "relative_attention_bias") else nothing
    return Relative(make, bool(getattr(part, "is_causal", True)))


def zeros(heads: int, queries: int, keys: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zero bias `(1, H, S, L)` that occupies the memory of a single number."""
    return torch.zeros((), dtype=dtype, device=device).expand(1, heads, queries, keys)
