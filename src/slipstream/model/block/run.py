"""Runs a block on a call of its layer: a padded batch with transformers' cache, masks and biases.

Shapes: B batch, S sequence, C hidden, T = B * S packed tokens, H heads, K kv heads, D head dim, L keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.model.block.block import Attend, Block, Mix
from slipstream.model.block.cross import CrossCall, Relative, add_bias, attend_across, own_heads, zeros
from slipstream.model.block.latent_attention import absorbed, expanded
from slipstream.model.block.layer_call import LayerCall
from slipstream.model.block.positions import positions_of, rope_table
from slipstream.ops.attention import attention
from slipstream.spec import BlockSpec, Role

__all__ = ["attention_of", "run_block"]


def run_block(
    block: Block,
    call: LayerCall,
    layer_index: int,
    table: Tensor | None,
    relative: Relative | None = None,
    *,
    mix: Mix | None = None,
    feed: Mix | None = None,
) -> tuple[Tensor, ...]:
    """Run a block on a padded batch in place of its layer.

    Args:
        block: The fused layer.
        call: The arguments that the model passed.
        layer_index: The layer's index in the cache.
        table: The layer's own `[sin | cos]` table by position, where the model passes none.
        relative: Computes the layer's relative position bias, where it has one and the call passes none.
        mix: Replaces attention, on `(B, S, C)`, if given.
        feed: Replaces the feed-forward, on `(B, S, C)`, if given.

    Returns:
        `(B, S, C)`; then, where layers share a relative position bias, that bias, followed by the one for
        cross-attention if the call has encoder states.
    """
    spec = block.spec
    batch, length, width = call.hidden.shape
    layer_index += call.offset
    biases: list[Tensor] = []
    attend = attention_of(block, call, layer_index, relative, biases)
    rope = None if spec.rope is None else rope_table(spec.rope, call, table)
    across = None if call.cross is None else attend_across(block, call.cross, layer_index)
    x = call.hidden.reshape(batch * length, width)

    def packed(own: Mix | None) -> Mix | None:
        return None if own is None else (lambda y: own(y.view(batch, length, width)).flatten(0, 1))

    positions = None if spec.growth is None else positions_of(call, layer_index, padded=spec.growth.padded)
    inputs = None if call.inputs is None else call.inputs.flatten(0, 1)
    own = {"mix": packed(mix), "feed": packed(feed)}
    out = block(x, rope, attend, across, **own, positions=positions, inputs=inputs)
    out = out.view(batch, length, width)
    if spec.relative != "shared":
        return (out,)
    if call.cross is not None:
        biases.append(_cross_bias(call.cross, spec, out))
    return (out, *biases)


def attention_of(
    block: Block,
    call: LayerCall,
    layer_index: int,
    relative: Relative | None = None,
    biases: list[Tensor] | None = None,
) -> Attend:
    """Return attention over a call's padded batch and cache; it appends the bias it uses to `biases`."""
    spec = block.spec
    batch, length, _ = call.hidden.shape

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in (q, k, v))
        before = 0 if relative is None or call.cache is None else _seen_before(call.cache, layer_index)
        k, v = _keep(call, spec, k, v, layer_index)
        if call.beyond is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip((k, v), call.beyond, strict=True))
        bias = call.bias
        if bias is None and relative is not None:
            bias = relative.make(q, k.shape[2], before)
        if bias is not None and biases is not None:
            biases.append(bias)
        if spec.latent is not None:
            return _latent_scores(call, block, q, k, v).flatten(0, 1)
        hides_later = spec.causal and (relative is None or relative.causal)
        masked = call if call.mask_of is None else replace(call, mask=call.mask_of(v))
        mask = _scores_mask(masked, block, q, k, bias=bias, causal=hides_later)
        options = {"scale": spec.scale, "softcap": spec.softcap, "sinks": block.mask.sinks}
        causal = spec.causal and mask is None
        out: Tensor = block.ops.attention.run(q, k, v, mask=mask, causal=causal, **options)
        return out.flatten(0, 1)

    return attend


def _keep(call: LayerCall, spec: BlockSpec, k: Tensor, v: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
    """Update the cache and return all keys and values that the queries see: the layer's own or borrowed."""
    length, seen = call.hidden.shape[1], 0
    kind = None if spec.rope is None else spec.rope.layer_type
    kind = kind if call.shared_as is None else call.shared_as
    if spec.sharing == "borrows":
        k, v = call.shared[kind]
        seen = k.shape[2] - length
    elif call.cache is not None:
        seen = int(call.cache.get_seq_length(layer_index)) if call.mask is None and length > 1 else 0
        if spec.cache_repeated:
            k, v = (t.repeat_interleave(spec.heads // spec.kv_heads, dim=1) for t in (k, v))
        k, v = call.cache.update(k, v, layer_index)
    if call.mask is None and spec.causal and spec.mask == "whole" and length > 1:
        # In transformers, no mask means that only causality applies; a static cache has unused slots after
        # the new tokens.
        k, v = k[:, :, : seen + length], v[:, :, : seen + length]
    if spec.sharing == "lends":  # without those slots: layers that borrow have no cache
        call.shared[kind] = k, v
    return k, v


def _seen_before(cache: Any, layer_index: int) -> Any:
    """Return the number of cached tokens; a static cache's counter is a tensor that changes, so copy it."""
    seen = cache.get_seq_length(layer_index)
    return seen.clone() if isinstance(seen, Tensor) else seen


def _cross_bias(cross: CrossCall, spec: BlockSpec, out: Tensor) -> Tensor:
    """Return the cross-attention bias that layers pass on: the one from the call, or zeros."""
    if cross.bias is not None:
        return cross.bias
    return zeros(spec.heads, out.shape[1], cross.states.shape[1], dtype=out.dtype, device=out.device)


def _latent_scores(call: LayerCall, block: Block, q: Tensor, short: Tensor, key: Tensor) -> Tensor:
    """Attend over cached latents: with absorbed projections for one token, else with keys per head."""
    latent, scale = block.spec.latent, block.spec.scale
    if latent is None:
        raise AssertionError("only blocks with latent attention come here")
    up = block.weights.matrices[Role.KV_UP].dense().to(q.dtype)
    mask = _scores_mask(call, block, q, short, bias=None, causal=block.spec.causal)
    if q.shape[2] == 1:
        return absorbed(q, short, key, up, latent=latent, mask=mask, scale=scale)
    keys, values = expanded(short, key, up, latent)
    return attention(q, keys, values, mask=mask, causal=block.spec.causal and mask is None, scale=scale)


def _scores_mask(
    call: LayerCall, block: Block, q: Tensor, k: Tensor, *, bias: Tensor | None, causal: bool
) -> Tensor | None:
    """Return the model's mask with the bias or alibi slopes, if any, added to it.

    `causal` says whether a missing mask means causality.
    """
    keys = k.shape[2]
    mask, bias = (None if t is None else own_heads(t, block.share) for t in (call.mask, bias))
    mask = _full_mask(mask, block.spec, q.shape[2], keys, q.device)
    if bias is not None:
        missing = block.spec.alibi_scale - block.spec.alibi_in_mask
        bias = bias[..., -keys:] if missing == 1.0 else bias[..., -keys:] * missing if missing else None
    elif block.mask.alibi is not None:
        # Softmax ignores a constant per query, so slope times key index equals slope times distance.
        bias = block.mask.alibi.view(1, -1, 1, 1) * torch.arange(keys, device=k.device)
    if bias is None:
        return mask
    if mask is None and causal and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], keys, dtype=torch.bool, device=q.device).tril(keys - q.shape[2])[
            None, None
        ]
    if bias.dtype != q.dtype and bias.shape[-2] == 1:
        # Relative to the query's own key, the bias of nearby keys is small and survives rounding.
        bias = bias - bias[..., keys - q.shape[2] :].mT
    return add_bias(bias.to(q.dtype), mask)


def _full_mask(
    mask: Tensor | None, spec: BlockSpec, queries: int, keys: int, device: torch.device
) -> Tensor | None:
    """Add the layer's causality and window to the model's mask: bool (true: visible), additive or None."""
    mask = None if mask is None else mask[..., :keys]
    if spec.scales_mask and mask is not None and mask.dtype != torch.bool:
        mask = mask * spec.scale
    if spec.mask == "hidden" and mask is not None and mask.dtype == torch.bool:
        return ~mask
    # With flash attention too, the model passes no mask: the attention applies causality and windows.
    windowed = mask is None and spec.causal and spec.window is not None and keys > spec.window
    if not windowed and (spec.mask != "padding" or (queries == 1 and spec.window is None)):
        return mask
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if spec.window is not None:
        visible = visible.triu(keys - queries - spec.window + 1)
    if mask is None:
        return visible[None, None]
    if mask.dtype == torch.bool:
        return mask & visible
    # Added, as the original does: keys that both hide get a lower score than keys that one of them hides, and
    # in a row that sees no key, this alone distinguishes keys.
    return mask + torch.zeros_like(visible, dtype=mask.dtype).masked_fill(
        ~visible, torch.finfo(mask.dtype).min
    )
