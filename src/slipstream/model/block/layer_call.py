"""Reads the arguments that transformers passes to a layer, and reduces a call to what a block needs.

Shapes: B batch, S sequence, C hidden, T = B * S packed tokens, H heads, K kv heads, D head dim, L keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.model.block.cross import (
    CrossCall,
    read_cross,
)
from slipstream.spec import BlockSpec

__all__ = ["LayerCall", "LayerSignature"]

_MASKS = ("attention_mask", "attn_mask", "mask")
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_BIASES = ("alibi", "position_bias")
_IGNORABLE = frozenset(
    {
        "use_cache",
        "position_ids",
        "cache_position",
        "position_embeddings",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
    }
)
"""Arguments that the block either reads or can ignore, whatever their value.

Some belong to the head or the loss, and reach the layers because models pass on unknown arguments.
"""
_PASSED_ON = frozenset({"mm_token_type_ids"})
"""Arguments that can be ignored unless the layer's own forward names them (to select experts for images)."""
_TABLE_TYPES = (tuple, list)
_STATES_MASK = "encoder_attention_mask"


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer, reduced to what a block needs.

    Attributes:
        hidden: Hidden states `(B, S, C)`.
        mask: 4-D mask (bool or additive), or None.
        bias: Added to the scores, `(B | 1, H, S | 1, L)`, or None.
        cache: A transformers cache with `update`, or None.
        rope: Cosines and sines that the model passed as `position_embeddings`, or None.
        positions: `(B | 1, S)` int64, or None.
        cross: Arguments about an encoder, or None.
        given: All arguments except the hidden states, by name, where a module of the layer replaces a branch
            or runs beside one.
        inputs: `(B, S, P)`, the per-layer input, or None.
        mask_of: Computes the mask from the values `(B, K, L, D)` that are attended to, or None.
        offset: Added to the layer's index in the cache, for layers that run more than once.
        shared: Mapping in which layers share keys and values, or None.
        shared_as: Key of this layer in `shared`; None for the rope's `layer_type`.
        beyond: Keys and values `(B, K, M, D)` of other rows, appended to the layer's own.
    """

    hidden: Tensor
    mask: Tensor | None
    bias: Tensor | None
    cache: Any
    rope: tuple[Tensor, Tensor] | None
    positions: Tensor | None
    cross: CrossCall | None = None
    given: Mapping[str, Any] | None = None
    inputs: Tensor | None = None
    shared: Any = None
    shared_as: Any = None
    mask_of: Callable[[Tensor], Tensor] | None = None
    offset: int = 0
    beyond: tuple[Tensor, Tensor] | None = None

    @property
    def has_bool_mask(self) -> bool:
        """Whether a mask is boolean rather than additive."""
        masks = (self.mask, None if self.cross is None else self.cross.mask)
        return any(mask is not None and mask.dtype == torch.bool for mask in masks)


class LayerSignature:
    """The call signature of one layer class; created once per class."""

    def __init__(self, layer_class: type, ignorable: frozenset[str] = frozenset()) -> None:
        """Read the signature of the class's own forward; blocks may ignore the `ignorable` arguments."""
        parameters = list(inspect.signature(inspect.unwrap(layer_class.forward)).parameters.values())[1:]  # type: ignore[attr-defined]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._order = [p.name for p in parameters if p.kind in positional]
        self.hidden = self._order[0] if self._order else ""
        self._ignorable = _IGNORABLE | ignorable | _PASSED_ON.difference(self._order)

    def name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name; `args` comes without `self`."""
        named = dict(zip(self._order, args, strict=False), **kwargs)
        if "hidden_state" in named and self.hidden == "hidden_states":
            named[self.hidden] = named.pop("hidden_state")  # transformers' decorators accept this name too
        if _STATES_MASK in self._ignorable:  # the layer does not read it, though it is given states
            named.pop(_STATES_MASK, None)
        return named

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: BlockSpec) -> LayerCall | None:
        """Reduce a call, or return None where it requests something that a block does not support.

        Args:
            args: Positional arguments, without `self`.
            kwargs: Keyword arguments.
            spec: Spec of the layer's block.
        """
        given = self.name(args, kwargs)
        hidden = given.pop(self.hidden, None)
        if spec.course is not None and isinstance(hidden, Tensor) and hidden.dim() == 4:
            hidden = hidden[0]  # one of several streams, which have the same shape
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(args) > len(self._order):
            return None
        if not spec.attends:
            known = self._ignorable.union(_MASKS, _CACHES)
            unknown = any(_asks(value) for name, value in given.items() if name not in known)
            return None if unknown else LayerCall(hidden, None, None, None, None, None, given=given)
        every = dict(given) if spec.beside else None
        shared = given.pop("shared_kv_states", None)
        inputs = given.pop("per_layer_input", None) if spec.inputs else None
        offset = given.pop("cycle_offset", 0)
        mask = _pop_first(given, _MASKS)
        cache = _pop_first(given, _CACHES)
        bias = _pop_first(given, _BIASES)
        cross = None
        if spec.cross is not None and given.get("encoder_hidden_states") is not None:
            cross = read_cross(given, hidden, cache)
            if cross is None:
                return None
        elif spec.cross is not None and spec.relative == "shared":
            return None  # without encoder states, the layer returns fewer values
        rope = given.get("position_embeddings")
        rope = _sinusoids(given.pop("sinusoidal_pos", None)) if rope is None else rope
        if isinstance(rope, Tensor) and rope.is_complex():
            rope = rope.real, rope.imag
        positions = given.get("position_ids")
        if given.pop("is_causal", None) not in (None, spec.causal):
            return None
        if any(_asks(value) for name, value in given.items() if name not in self._ignorable):
            return None
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4):
            if spec.course is None or "attention_mask" not in self._ignorable:
                return None
            mask = None  # the course reads masks of this form itself
        if bias is not None:
            bias = _shape_bias(bias, hidden.shape[0], spec.heads)
            if bias is None:
                return None
        cache = getattr(cache, "self_attention_cache", cache)
        if cache is not None and not hasattr(cache, "update"):
            return None
        if rope is not None and not (isinstance(rope, _TABLE_TYPES) and len(rope) == 2):
            return None
        table = None if rope is None else (rope[0], rope[1])
        if (spec.inputs and inputs is None) or (spec.sharing != "own" and shared is None):
            return None
        own: dict[str, Any] = {"inputs": inputs, "shared": shared, "offset": offset, "given": every}
        return LayerCall(hidden, mask, bias, cache, table, positions, cross, **own)

    def read_own(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, packed: bool) -> LayerCall | None:
        """Reduce a call of a layer with `own_attention`; hidden states are `(S, C)` where `packed`."""
        given = self.name(args, kwargs)
        hidden, rope = given.pop(self.hidden, None), given.get("position_embeddings")
        if not isinstance(hidden, Tensor) or hidden.dim() != (2 if packed else 3):
            return None
        if len(args) > len(self._order) or any(
            _asks(value) for name, value in given.items() if name not in self._ignorable
        ):
            return None
        table = (rope[0], rope[1]) if isinstance(rope, _TABLE_TYPES) and len(rope) == 2 else None
        return LayerCall(hidden[None] if packed else hidden, None, None, None, table, None)


def _pop_first(given: dict[str, Any], names: tuple[str, ...]) -> Any:
    values = [given.pop(name) for name in names if name in given]
    return next((value for value in values if value is not None), None)


def _sinusoids(table: Any) -> tuple[Tensor, Tensor] | None:
    """Split RoFormer's `(1, 1, S, D)` table `[sin | cos]` into cosines and sines; None if it is no tensor."""
    if not isinstance(table, Tensor):
        return None
    sin, cos = table.flatten(0, -3).chunk(2, dim=-1)
    return cos, sin


def _asks(value: Any) -> bool:
    """Whether the value of an argument that no block knows requests anything."""
    return not (value is None or value is False)


def _shape_bias(bias: Any, batch: int, heads: int) -> Tensor | None:
    """Reshape a flat alibi `(B * H, 1, L)`, or `(H, S, L)`, to `(B | 1, H, S | 1, L)`; None if impossible."""
    if not isinstance(bias, Tensor):
        return None
    if bias.dim() == 4:
        return bias
    if bias.dim() == 3 and bias.shape[0] == batch * heads:
        return bias.view(batch, heads, *bias.shape[1:])
    return bias[None] if bias.dim() == 3 and bias.shape[0] == heads else None
